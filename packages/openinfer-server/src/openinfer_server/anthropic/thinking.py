"""What `thinking` and `output_config.effort` tell the chat template."""

from openinfer_server.anthropic.types import Prompting, ThinkingAdaptive, ThinkingDisabled, ThinkingEnabled
from openinfer_server.chat.variables import LEVEL, Variables, reads_levels, switch_variables
from openinfer_server.http.api_errors import refused
from openinfer_server.service import Service


def thinking_variables(service: Service, request: Prompting) -> Variables:
    """Variables of the template.

    Without `thinking` there is none, as Anthropic's clients expect, whatever the template would do. `effort` is the
    template's level; a template that can only be told to think or not is told to think, if thinking is not off.

    Raises:
        ApiError: 400; the template cannot be told what was asked for.
    """
    thinking = request.thinking
    effort = None if request.output_config is None else request.output_config.effort
    match thinking:
        case ThinkingEnabled():
            variables = switch_variables(service, thinks=True) or {}  # a template without a switch always thinks
        case ThinkingAdaptive():
            variables = {}
        case ThinkingDisabled() | None:
            switched = switch_variables(service, thinks=False)
            if switched is None and thinking is not None and service.parsers.reasoning is not None:
                raise refused("thinking", "the chat template cannot switch thinking off")
            variables = switched or {}
    if effort is None:
        return variables
    if reads_levels(service):
        return {**variables, LEVEL: effort}
    if isinstance(thinking, ThinkingEnabled | ThinkingAdaptive):
        switched = switch_variables(service, thinks=True)
        if switched is not None:
            return switched
    if effort == "high":  # the API's default
        return variables
    raise refused("output_config.effort", "the chat template does not read reasoning_effort; high is what is always so")
