"""`Service`: what the routes of one server share."""

import asyncio
import time
from dataclasses import dataclass, field

from openinfer_core.engine import AdapterStats, EngineInfo
from openinfer_core.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.http.access import Access
from openinfer_server.http.api_errors import ApiError, busy, shutting_down
from openinfer_server.limits.budgets import Budgets
from openinfer_server.limits.worker_table import WorkerTable
from openinfer_server.observability.metrics import ServerMetrics
from openinfer_server.observability.metrics_snapshot import MetricsSnapshot
from openinfer_server.options import ServerOptions
from openinfer_server.output.engine_link import EngineLink
from openinfer_server.parsers.choose import ModelParsers
from openinfer_server.request.prefix_breaks import PrefixBreaks
from openinfer_server.text.control_tokens import ControlTokens
from openinfer_server.text.tokenizer import Tokenizer
from openinfer_server.workers.peers import NoPeers, Peers

ADAPTERS_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Service:
    """One server's parts.

    Attributes:
        draining: whether new generation requests are refused, because the server is ending.
        control_tokens: what of a chat only its template writes; None without a template.
    """

    options: ServerOptions
    link: EngineLink
    metrics: ServerMetrics
    tokenizer: Tokenizer
    template: ChatTemplate | None
    budgets: Budgets
    parsers: ModelParsers = field(default_factory=ModelParsers)
    access: Access = field(default_factory=lambda: Access(None))
    peers: Peers = field(default_factory=NoPeers)
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    draining: bool = False
    prefix_breaks: PrefixBreaks = field(default_factory=PrefixBreaks)
    started: int = field(default_factory=lambda: int(time.time()))
    control_tokens: ControlTokens | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.template is not None:
            own_texts, markers = self.template.own_texts, self.parsers.markers
            self.control_tokens = self.tokenizer.control_tokens(
                own_texts=own_texts, markers=markers, known_prefix_bytes=self.options.known_prefix_bytes
            )

    def share(self, table: WorkerTable) -> None:
        """Makes what owners share a budget of all workers, before the first request."""
        self.budgets.share(table)
        self.tokenizer.encoding.characters.share(table)
        self.link.admission.share(table)

    def snapshot(self) -> MetricsSnapshot:
        if self.control_tokens is not None:
            known = self.control_tokens.known_prefixes
            self.metrics.known_characters.value = known.known_characters
            self.metrics.encoded_characters.value = known.new_characters
        self.metrics.prefix_breaks.value = self.prefix_breaks.count
        self.metrics.prefix_break_tokens.value = self.prefix_breaks.lost_tokens
        budgets = [*self.budgets.uses(), self.tokenizer.encoding.characters.use, *self.link.admission.uses()]
        return MetricsSnapshot.of(self.metrics, open_requests=self.link.num_open, budgets=budgets)

    @property
    def info(self) -> EngineInfo:
        return self.link.handle.info

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names clients may ask for."""
        return tuple(self.options.model_name) or (self.info.model,)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be answered, and not texts alone continued."""
        return self.template is not None

    @property
    def calls_tools(self) -> bool:
        """Whether the model is shown tools, and its calls are told from its text."""
        return self.template is not None and self.template.knows_tools and self.parsers.tools is not None

    @property
    def tells_reasoning(self) -> bool:
        """Whether the model's reasoning is told from its answer."""
        return self.parsers.reasoning is not None

    def check_serving(self, owner: str = "") -> None:
        """Refuses work while the server is ending, or the queue, or the owner's share of it, is full.

        It is asked before a request's body is read, for its `HttpRequest.owner`.
        """
        if self.draining:
            raise shutting_down("the server is shutting down")
        if self.link.dead:
            raise shutting_down("the engine has ended")
        self.link.admission.check_open(owner)

    async def find_model(self, name: str | None, owner: str) -> str:
        """The model's name as answers show it: a served one, or that of an adapter that the owner may use.

        Adapters are the engine's, which is asked at every request: all API workers see a change at once.

        Raises:
            ApiError: 404; there is no such model, or not for this owner.
        """
        if name is not None and name not in self.model_names:
            names = [adapter.name for adapter in await self.adapters(owner)]
            if name in names:
                return name
        return self.resolve_model(name)

    async def adapters(self, owner: str | None) -> list[AdapterStats]:
        """Those that the owner of a request may see and use, by name; None: all, for operators.

        Raises:
            ApiError: 503; the engine does not answer.
        """
        if not self.info.max_adapters:
            return []
        try:
            async with asyncio.timeout(ADAPTERS_TIMEOUT_S):
                stats = await self.link.stats()
        except TimeoutError as error:
            raise busy("the engine does not answer") from error
        if stats is None:
            raise shutting_down(self.link.ended_because)
        return [each for each in stats.adapters if owner is None or not each.tenants or owner in each.tenants]

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request asks for by the name of a model that `find_model` has found; None: none."""
        return None if name is None or name in self.model_names else name

    def resolve_model(self, name: str | None) -> str:
        """The model's name as answers show it, of those that are no adapters'."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            message = f"the model {name[:200]!r} is not served here; this is {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name
