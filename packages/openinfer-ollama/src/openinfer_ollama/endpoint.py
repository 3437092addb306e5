"""Ollama's `POST /api/generate` and `GET /api/tags`."""

import msgspec

from openinfer_server import ApiError, GenerationFields, HttpRequest, Route, RouteDoc, Service, complete


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/generate`."""

    model: str
    prompt: str
    stream: bool = True
    options: Options = Options()


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /api/generate`."""

    model: str
    response: str
    done: bool = True
    done_reason: str
    prompt_eval_count: int
    eval_count: int


class Tag(msgspec.Struct, frozen=True):
    """A model."""

    name: str


class Tags(msgspec.Struct, frozen=True):
    """Response of `GET /api/tags`."""

    models: list[Tag]


_decoder = msgspec.json.Decoder(GenerateRequest)


def endpoints(service: Service) -> list[Route]:
    """The routes, for one server."""

    async def generate(http_request: HttpRequest) -> None:
        request = await http_request.read_json(_decoder)
        if request.stream:
            raise ApiError(400, 'stream is not supported here; send "stream": false', param="stream")
        model, options = service.resolve_model(request.model), request.options
        fields = GenerationFields(
            max_tokens=options.num_predict,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            stop=options.stop,
        )
        done = await complete(http_request, service, request.prompt, fields)
        answer = GenerateAnswer(
            model=model,
            response=done.text,
            done_reason=done.finish_reason,
            prompt_eval_count=done.prompt_tokens,
            eval_count=done.completion_tokens,
        )
        await http_request.send(200, msgspec.json.encode(answer))

    async def tags(http_request: HttpRequest) -> None:
        models = [Tag(name) for name in service.model_names]
        await http_request.send(200, msgspec.json.encode(Tags(models)))

    return [
        Route(
            method="POST",
            path="/api/generate",
            handler=generate,
            doc=RouteDoc(
                summary="Continues a prompt.",
                tag="Ollama",
                body=GenerateRequest,
                response=GenerateAnswer,
                errors=(404, 408, 413, 415, 429, 503),
            ),
        ),
        Route(
            method="GET",
            path="/api/tags",
            handler=tags,
            doc=RouteDoc(summary="Lists the models.", tag="Ollama", response=Tags),
        ),
    ]
