"""The routes of `/v1/responses` and what the OpenAPI document says of them."""

from openinfer_server.http.routes import Route, RouteDoc
from openinfer_server.responses.events import Event
from openinfer_server.responses.handlers import ERRORS, ItemList, Responses
from openinfer_server.responses.items import InputItem
from openinfer_server.responses.objects import DeletedResponse, InputTokens, ResponseObject
from openinfer_server.responses.types import (
    FunctionTool,
    InputTokensRequest,
    ItemsQuery,
    NamespaceTool,
    ResponseRequest,
    RetrieveQuery,
)
from openinfer_server.service import Service


def response_routes(service: Service) -> list[Route]:
    responses = Responses(service)

    def route(method: str, path: str, name: str, doc: RouteDoc, *, may_go_back: bool = False) -> Route:
        handler = getattr(responses, name)
        return Route(method=method, path=f"/v1/responses{path}", handler=handler, doc=doc, may_go_back=may_go_back)

    def about(summary: str, response: object) -> RouteDoc:
        return RouteDoc(summary=summary, tag="Responses", response=response, errors=(404,))

    return [
        route(
            "POST",
            "",
            "create",
            RouteDoc(
                summary="Answers items with items.",
                tag="Responses",
                body=ResponseRequest,
                response=ResponseObject,
                events=Event,
                also=(InputItem, FunctionTool, NamespaceTool),
                errors=ERRORS,
            ),
            may_go_back=True,
        ),
        route(
            "POST",
            "/input_tokens",
            "input_tokens",
            RouteDoc(
                summary="Counts the tokens of a prompt.",
                tag="Responses",
                body=InputTokensRequest,
                response=InputTokens,
                errors=(404, 408, 413, 415),
            ),
            may_go_back=True,
        ),
        route(
            "POST",
            "/compact",
            "compact",
            RouteDoc(summary="Refused: nothing is summarised.", tag="Responses", media_type=b""),
        ),
        route(
            "GET",
            "/{response_id}",
            "retrieve",
            RouteDoc(
                summary="Shows a response that is kept.",
                tag="Responses",
                query=RetrieveQuery,
                response=ResponseObject,
                events=Event,
                errors=(404,),
            ),
        ),
        route("DELETE", "/{response_id}", "delete", about("Forgets a response.", DeletedResponse)),
        route("POST", "/{response_id}/cancel", "cancel", about("Ends a background response.", ResponseObject)),
        route(
            "GET",
            "/{response_id}/input_items",
            "input_items",
            RouteDoc(
                summary="Lists what a response's prompt was made of.",
                tag="Responses",
                query=ItemsQuery,
                response=ItemList,
                errors=(404,),
            ),
        ),
    ]
