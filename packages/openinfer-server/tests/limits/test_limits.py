"""Bounds on what requests may ask for, on the queue, and on what is held at once; each is told by name and in time."""

import json
import socket
import time

import msgspec
import pytest

from openinfer_core.process.local import InProcessEngine
from openinfer_core.request import RequestId
from openinfer_server import ServerOptions
from openinfer_server.chat.template import ChatTemplate, RenderingRefused
from openinfer_server.http.api_errors import ApiError
from openinfer_server.limits.admission import AdmissionControl, queue_bound
from openinfer_server.limits.request_cost import PromptCost, RequestCost
from openinfer_server.testing import DEADLINE_S, ParrotLoop, RecordingEngine, wait_until

COMPLETIONS = "/v1/completions"


def test_cost_counts_whole_blocks_and_every_choice():
    prompts = [PromptCost(17, 15, 2, None), PromptCost(1, 16, None, 0)]
    cost = RequestCost.of(prompts, n=3, block_size_tokens=16)
    assert cost == RequestCost(prompt_tokens=54, kv_tokens=3 * (2 + 2) * 16, logprob_entries=3 * (15 * 3 + 1))


@pytest.mark.parametrize(
    ("cost", "param", "word"),
    [
        (RequestCost(101, 0, 0), "prompt", "101 prompt tokens"),
        (RequestCost(0, 201, 0), "max_tokens", "room for 201 tokens"),
        (RequestCost(0, 0, 301), "logprobs", "301 log-probabilities"),
    ],
)
def test_cost_beyond_a_bound_is_told_by_name(cost, param, word):
    options = ServerOptions(max_request_tokens=100, max_request_kv_tokens=200, max_logprob_entries=300)
    with pytest.raises(ApiError, match=word) as error:
        cost.check(options, "prompt")
    assert (error.value.status, error.value.body.param) == (400, param)
    RequestCost(100, 200, 300).check(options, "prompt")


def test_cost_is_checked_before_anything_is_asked_of_the_engine(start, call, info):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_request_kv_tokens=1024))
    status, _, answer = call(server, "POST", COMPLETIONS, {"prompt": "a", "n": 100, "max_tokens": 100})
    assert status == 400
    assert b"lower max_tokens or n" in answer
    assert server.engine.submitted == []
    assert call(server, "POST", COMPLETIONS, {"prompt": "a", "n": 9, "max_tokens": 100})[0] == 200


@pytest.mark.parametrize("options", [{"max_logprob_entries": 250}, {"max_request_kv_tokens": 500}])
@pytest.mark.parametrize("n", [1, 3])
def test_chat_without_max_tokens_asks_for_no_more_than_it_may(start, call, info, options, n):
    server = start(ParrotLoop(info), ServerOptions(port=0, **options))
    chat = {"messages": [{"role": "user", "content": "a"}], "n": n, "logprobs": True, "top_logprobs": 4}
    status, _, answer = call(server, "POST", "/v1/chat/completions", chat)
    assert status == 200, answer
    (asked,) = {request.sampling.max_tokens for request in server.engine.submitted}
    if "max_logprob_entries" in options:
        assert n * 5 * asked <= 250 < n * 5 * (asked + 1)
    else:
        prompt_tokens = json.loads(answer)["usage"]["prompt_tokens"]
        assert asked == 500 // n // info.block_size_tokens * info.block_size_tokens - prompt_tokens


def test_waiting_room_knows_who_is_in_it():
    room = AdmissionControl(max_requests=3, max_tokens=100)
    room.check_room("a", 500)  # a single request may bring more
    room.enter(RequestId(1), "a", 60)
    room.check_room("a", 15)
    with pytest.raises(ApiError, match="41 more do not fit; 60 of them are yours") as error:
        room.check_room("a", 41)
    assert error.value.status == 429
    room.enter(RequestId(2), "a", 40)
    with pytest.raises(ApiError, match="100 prompt tokens are waiting"):
        room.check_open("a")
    room.leave(RequestId(1))
    room.leave(RequestId(1))
    assert (len(room), room.num_tokens) == (1, 40)
    room.enter(RequestId(3), "a", 1)
    room.enter(RequestId(4), "a", 1)
    with pytest.raises(ApiError, match="3 requests are waiting"):
        room.check_open("a")


class Replicas(RecordingEngine):
    """Engines that come and go."""

    max_waiting = 2


def test_the_bound_of_a_queue_follows_replicas_that_come_and_go(info):
    loop = ParrotLoop(info)
    assert queue_bound(RecordingEngine(InProcessEngine(loop))) == info.max_waiting
    replicas = Replicas(InProcessEngine(loop))
    room = AdmissionControl(max_requests=queue_bound(replicas))
    for number in range(2):
        room.check_open("a")
        room.enter(RequestId(number), "a", 1)
    with pytest.raises(ApiError, match="2 requests are waiting"):
        room.check_open("a")
    replicas.max_waiting = 8
    room.check_open("a")
    assert room.uses()[0].limit == 8
    replicas.max_waiting = 0  # none gets requests: the queue takes one, which the engine refuses by name
    assert room.uses()[0].limit == 1


def test_owner_that_fills_the_queue_is_refused_and_a_newcomer_is_not():
    room = AdmissionControl(max_requests=16, max_tokens=1600)

    def flood(owner: str, first: int) -> int:
        before = len(room)

        def take_all() -> None:
            for number in range(first, first + 100):
                room.check_room(owner, 100)
                room.enter(RequestId(number), owner, 100)

        with pytest.raises(ApiError) as refusal:
            take_all()
        assert (refusal.value.status, dict(refusal.value.headers)[b"retry-after"]) == (429, b"1")
        return len(room) - before

    assert flood("a", 0) == 12
    assert flood("b", 100) == 3
    room.check_open("c")
    with pytest.raises(ApiError, match="1500 prompt tokens are waiting, and 100 more do not fit") as error:
        room.check_room("c", 100)
    assert error.value.status == 503  # nothing of what waits is its own
    for number in range(6):
        room.leave(RequestId(number))
    assert flood("c", 200) == 5
    assert {use.budget: use.used for use in room.uses()} == {"queued_requests": 14, "queued_tokens": 1400}


@pytest.mark.parametrize("bound", [{"max_waiting": 8}, {"max_queued_tokens": 80}])
def test_flood_of_one_address_leaves_room_in_the_queue_for_another(start, call, info, bound):
    parrot = QueueingParrot(msgspec.structs.replace(info, max_waiting=bound.get("max_waiting", 1000)))
    server = start(parrot, ServerOptions(port=0, max_queued_tokens=bound.get("max_queued_tokens", 10**6)))
    parrot.hold()
    body = json.dumps({"prompt": [1] * 10, "max_tokens": 1}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    asked = head + b"content-length: %d\r\n\r\n" % len(body) + body

    def ask(address: str) -> socket.socket:
        connection = socket.create_connection(server.address, timeout=DEADLINE_S, source_address=(address, 0))
        connection.sendall(asked)
        return connection

    flood = [ask("127.0.0.1") for _ in range(6)]
    wait_until(lambda: len(server.engine.submitted) == 6, "six requests")
    with ask("127.0.0.1") as refused:
        assert refused.recv(65536).startswith(b"HTTP/1.1 429")
    newcomer = ask("127.0.0.2")
    wait_until(lambda: len(server.engine.submitted) == 7, "the newcomer's request")
    assert {(each.tenant, each.cache_salt) for each in server.engine.submitted} == {
        ("127.0.0.1", None),
        ("127.0.0.2", None),
    }
    page = call(server, "GET", "/metrics")[2].decode()
    assert 'openinfer_budget_used{budget="queued_requests"} 7' in page
    assert 'openinfer_budget_used{budget="queued_tokens"} 70' in page
    parrot.go()
    for connection in (newcomer, *flood):
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.close()


class QueueingParrot(ParrotLoop):
    """Begins nothing before `go`."""

    def submit(self, request):
        super().submit(request)
        return []


def test_full_queue_is_told_before_the_body_is_read(start, call, info):
    parrot = QueueingParrot(msgspec.structs.replace(info, max_waiting=2))
    server = start(parrot)
    parrot.hold()
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    open_connections = [socket.create_connection(server.address, timeout=DEADLINE_S) for _ in range(2)]
    for connection in open_connections:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    wait_until(lambda: len(server.engine.submitted) == 2, "two requests")
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        connection.sendall(head + b"content-length: 1000000\r\n\r\n")  # and nothing of it comes
        assert connection.recv(65536).startswith(b"HTTP/1.1 429")
    parrot.go()
    for connection in open_connections:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.close()
    wait_until(lambda: call(server, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200, "room again")


def test_queue_is_bounded_by_tokens(start, call, info):
    parrot = QueueingParrot(info)
    server = start(parrot, ServerOptions(port=0, max_queued_tokens=1000))
    parrot.hold()
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        body = json.dumps({"prompt": [1] * 700, "max_tokens": 1}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: len(server.engine.submitted) == 1, "a request")
        status, headers, answer = call(server, "POST", COMPLETIONS, {"prompt": [1] * 101, "max_tokens": 1})
        assert (status, headers["retry-after"]) == (429, "1")
        assert b"101 more do not fit" in answer
        assert len(server.engine.submitted) == 1
    wait_until(lambda: server.engine.aborted, "an abort")  # its client left
    parrot.go()
    assert call(server, "POST", COMPLETIONS, {"prompt": [1] * 101, "max_tokens": 1})[0] == 200


def test_bodies_are_bounded_in_all_and_given_back(start, call, info):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_open_body_bytes=2000))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(server.address, timeout=DEADLINE_S) as connection:
        connection.sendall(head + b"content-length: 1900\r\n\r\n" + b" " * 1550)

        def refused() -> bool:
            status, headers, _ = call(server, "POST", COMPLETIONS, {"prompt": "stone " * 50, "max_tokens": 1})
            assert status in (200, 429)
            return status == 429 and headers["retry-after"] == "1"

        wait_until(refused, "a refusal")
    wait_until(lambda: not refused(), "room again")


def test_body_of_too_many_values_is_refused_before_it_is_decoded(start, call, info):
    server = start(ParrotLoop(info), ServerOptions(port=0, max_body_elements=1000))
    for prompt in ([1] * 1002, [[]] * 600, "," * 1001):
        status, _, answer = call(server, "POST", COMPLETIONS, {"prompt": prompt})
        assert (status, json.loads(answer)["error"]["code"]) == (400, "too_many_elements")
    assert call(server, "POST", COMPLETIONS, {"prompt": "stone " * 300, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ 'x' * 1000000000 }}",
        *(
            f"{{% set a = 'x' * 9999 %}}{{{{ {form} }}}}"
            for form in (
                *("a.replace('x', a)", "a.replace('', a)", "a | replace('x', a)", "a | replace('x', a, 5000)"),
                *(
                    "a.join(a)",
                    "a | join(a)",
                    "a.join(a | map('upper'))",
                    "[a, a] | join",
                    "['b', 'c'] | map('center', 9999) | join",
                ),
                *("a.replace('x', '\t').expandtabs(9999)", "a.translate({120: a})", "a.encode().decode().join(a)"),
                *(
                    "'{0}{0}'.format(a)",
                    "'{x}{x}'.format(x=a)",
                    "'{x}{x}'.format_map({'x': a})",
                    "'{}{}'.format([a], a)",
                ),
                *("'%s%s' % (a, a)", "'%(x)s%(x)s' % {'x': a}", "'%s%s' | format(a, a)", "'%s' % ([a, a],)"),
                *(
                    "[a, a]",
                    "[a, a] | string",
                    "[a, a] | upper",
                    "[a, a] | tojson",
                    "{'b': a, 'c': a} ~ ''",
                    "[a, a] | pprint",
                ),
                *("a | wordwrap(1, wrapstring=a)", "(a.replace('x', '\n')) | indent(a)", "a | indent(99, first=true)"),
                *("[[[1]]] | tojson(indent=9999)", "([[a] * 999] * 999) | sum(start=[])", "a | urlize(rel=a)"),
            )
        ),
        "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
        "{% set b %}{% for i in range(99) %}{{ 'x' * 999 }}{% endfor %}{% endset %}{{ b | length }}",
        "{% macro m() %}{% for i in range(99) %}{{ 'x' * 999 }}{% endfor %}{% endmacro %}{{ m() | length }}",
    ],
)
def test_template_cannot_make_a_large_value(source):
    begin_s = time.process_time()
    with pytest.raises(RenderingRefused, match=r"more than|beyond all measure|exceeds"):
        ChatTemplate(source, {}, timeout_s=60, max_characters=10_000).render([], {})
    assert time.process_time() - begin_s < 5  # each would take minutes or all memory


@pytest.mark.parametrize(
    "form",
    [
        *(
            "a | wordwrap(79)",
            "a | truncate(255)",
            "a | truncate(9000, true, '...')",
            "a | indent(4)",
            "a | indent(4, first=true)",
        ),
        *(
            "a | center(99)",
            "a | urlize",
            "a | replace('x', 'y')",
            "a.replace('x', 'y')",
            "a | e",
            "a | pprint",
            "[a] | tojson",
        ),
        *(
            "'%s!' % a",
            "'{}!'.format(a)",
            "'{0}{1}'.format(a, 'b')",
            "[a, 'b'] | join(', ')",
            "', '.join([a, 'b'])",
            "[a]",
        ),
        *(
            "a | trim",
            "a | upper",
            "a.expandtabs(4)",
            "a.translate({120: 'y'})",
            "a.ljust(9)",
            "{'b': a} | tojson(indent=2)",
        ),
    ],
)
def test_text_that_just_fits_is_no_large_value(form):
    source = "{% set a = ('x' * 94 + '\n\n') * 100 %}{{ (" + form + ") | length }}"
    assert int(ChatTemplate(source, {}, timeout_s=60, max_characters=10_500).render([], {})) > 0


def test_template_may_put_texts_together():
    source = "{{ 'a' ~ 1 ~ none ~ missing ~ 'b' + 'c' }}{{ '%s %03d %%' % ('x', 7) }}{{ [1] + [2] }}"
    assert ChatTemplate(source, {}, timeout_s=1, max_characters=100).render([], {}) == "a1Nonebcx 007 %[1, 2]"
