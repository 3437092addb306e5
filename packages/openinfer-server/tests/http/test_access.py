"""Who may come in: keys, tenants, levels, hosts, origins, certificates."""

import contextlib
import hashlib
import http.client
import json
import ssl
import subprocess

import anthropic
import openai
import pytest

from openinfer_server import Level, ServerOptions, UnusableCertificate, UnusableKeys, run_starting
from openinfer_server.http.access import Access, ApiKey
from openinfer_server.http.api_errors import ApiError
from openinfer_server.http.tls import tls_context
from openinfer_server.request.plan import salt_of
from openinfer_server.testing import ParrotLoop

ACME, ACME_NEW, RIVAL, ROOT = (
    "acme-0123456789abcdef",
    "acme-new-0123456789ab",
    "rival-0123456789abcdef",
    "root-" + "x" * 16,
)
KEYS = f"""
[[keys]]
tenant = "acme"
key = "{ACME}"

[[keys]]
tenant = "acme"
sha256 = "{hashlib.sha256(ACME_NEW.encode()).hexdigest()}"

[[keys]]
tenant = "rival"
key = "{RIVAL}"

[[keys]]
tenant = "operators"
key = "{ROOT}"
level = "admin"
"""
ASK = {"prompt": "stone", "max_tokens": 2}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def locked(start, info, key_file):
    return start(ParrotLoop(info), ServerOptions(port=0, api_keys_file=key_file))


def ask(server, method="GET", path="/v1/models", body=None, **headers):
    """One request with these headers: status, headers, body."""
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=20)) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            sent["content-type"] = "application/json"
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=sent)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def test_every_route_asks_for_a_key_unless_it_is_public(locked):
    document = json.loads(ask(locked, path="/openapi.json")[2])
    seen = dict.fromkeys(Level, 0)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            level = Level(operation["x-openinfer-level"])
            seen[level] += 1
            status, headers, answer = ask(locked, method.upper(), path)
            assert (status == 401) == (level is not Level.PUBLIC), (method, path, status)
            assert ("security" in operation) == (level is not Level.PUBLIC)
            if status == 401:
                assert headers["www-authenticate"] == "Bearer"
                assert b"API key" in answer
    assert all(seen.values())


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ACME[:-1]}"},
        {"authorization": f"Bearer {ACME}x"},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {ACME}"},
        {"authorization": ACME},
        {"x_api_key": "é" * 20},
        {"authorization": f"Bearer {ACME}", "x_api_key": RIVAL},
    ],
)
def test_wrong_keys_are_refused_and_never_repeated(locked, headers):
    status, _, answer = ask(locked, **headers)
    assert status == 401
    assert ACME[:8].encode() not in answer
    assert locked.engine.submitted == []


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ACME}"},
        {"authorization": f"bearer  {ACME}"},
        {"x_api_key": ACME},
        {"authorization": f"Bearer {ACME}", "x_api_key": ACME},
        {"authorization": f"Bearer {ACME_NEW}"},
        {"authorization": f"Bearer {ROOT}"},
    ],
)
def test_a_key_opens_routes_of_users(locked, headers):
    assert ask(locked, **headers)[0] == 200


def test_body_of_a_stranger_is_not_read(start, info, key_file):
    server = start(ParrotLoop(info), ServerOptions(port=0, api_keys_file=key_file))
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=20)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "1000000")
        connection.endheaders()
        assert connection.getresponse().status == 401


def test_both_sdks_come_in_with_their_header_and_fail_with_their_error(locked):
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=ACME, max_retries=0) as client:
        assert client.models.list().data
    with anthropic.Anthropic(base_url=locked.url, api_key=RIVAL, max_retries=0) as client:
        assert client.models.list().data
    openai_stranger = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="no", max_retries=0)
    with openai_stranger as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    anthropic_stranger = anthropic.Anthropic(base_url=locked.url, api_key="no", max_retries=0)
    with anthropic_stranger as client, pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        client.models.list()


def test_tenant_goes_to_the_engine_and_salts_the_prefix_cache(locked):
    for key, salt in ((ACME, None), (ACME_NEW, None), (RIVAL, None), (RIVAL, "mine")):
        body = ASK if salt is None else {**ASK, "cache_salt": salt}
        assert ask(locked, "POST", "/v1/completions", body, authorization=f"Bearer {key}")[0] == 200
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert ask(locked, "POST", "/v1/chat/completions", chat, x_api_key=RIVAL)[0] == 200
    assert ask(locked, "POST", "/v1/messages", {**chat, "model": "parrot"}, x_api_key=RIVAL)[0] == 200
    assert ask(locked, "POST", "/v1/responses", {"input": "hello", "max_output_tokens": 2}, x_api_key=RIVAL)[0] == 200
    generate = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
    assert ask(locked, "POST", "/inference/v1/generate", generate, x_api_key=RIVAL)[0] == 200
    requests = locked.engine.submitted
    assert [request.tenant for request in requests] == ["acme"] * 2 + ["rival"] * 6
    acme, acme_new, rival, salted, *others = [request.cache_salt for request in requests]
    assert acme == acme_new
    assert len({acme, rival, salted}) == 3
    assert set(others) == {rival}


def test_no_salt_that_a_request_gives_is_another_tenants():
    assert salt_of("", "given") == "given"
    assert salt_of("", None) is None
    salts = [salt_of(tenant, given) for tenant in ("a", "ab") for given in (None, "", "b", salt_of("a", None))]
    assert len(set(salts)) == len(salts)


def test_responses_of_another_tenant_are_not_there(locked):
    status, _, answer = ask(locked, "POST", "/v1/responses", {"input": "hello", "max_output_tokens": 2}, x_api_key=ACME)
    assert status == 200
    path = f"/v1/responses/{json.loads(answer)['id']}"
    assert ask(locked, path=path, x_api_key=ACME_NEW)[0] == 200
    assert ask(locked, path=path, x_api_key=RIVAL)[0] == 404
    further = {"input": "more", "previous_response_id": json.loads(answer)["id"]}
    assert ask(locked, "POST", "/v1/responses", further, x_api_key=RIVAL)[0] == 404
    assert ask(locked, "DELETE", path, x_api_key=RIVAL)[0] == 404


def test_routes_of_operators_need_a_key_of_their_level(locked, start, info):
    adapter = {"lora_name": "a", "lora_path": "/a"}
    assert ask(locked, "POST", "/v1/load_lora_adapter", adapter, x_api_key=ACME)[0] == 403
    assert ask(locked, "POST", "/v1/load_lora_adapter", adapter, x_api_key=ROOT)[0] == 400  # no family has adapters
    status, _, answer = ask(start(ParrotLoop(info)), "POST", "/v1/load_lora_adapter", adapter)
    assert status == 403
    assert b"--api-keys-file" in answer


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("keys = []", "no keys"),
        ("keys", "malformed"),
        ('[[keys]]\ntenant = "a"\nkey = "0123456789"', "at least 16"),
        ('[[keys]]\ntenant = "a"\nkey = "0123456789 0123456789"', "visible"),
        ('[[keys]]\ntenant = ""\nkey = "0123456789abcdef"', "1 to 512"),
        ('[[keys]]\ntenant = "a"', "either"),
        ('[[keys]]\ntenant = "a"\nsha256 = "XY"', "64"),
        ('[[keys]]\ntenant = "a"\nkey = "0123456789abcdef"\nlevel = "public"', "user or admin"),
        ('[[keys]]\ntenant = "a"\nkey = "0123456789abcdef"\nadmin = true', "admin"),
        ('[[keys]]\ntenant = "a"\nkey = "0123456789abcdef"\n' * 2, "same key"),
    ],
)
def test_key_file_that_is_wrong_stops_the_start(tmp_path, text, word):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(UnusableKeys, match=word) as error:
        Access.load(str(path))
    assert "0123456789" not in str(error.value)


def test_key_file_that_is_not_there_stops_the_start_before_an_engine_is_started(tmp_path, model_dir):
    options = ServerOptions(port=0, api_keys_file=str(tmp_path / "none"))
    launched = []
    with pytest.raises(UnusableKeys, match="cannot be read"):
        run_starting(lambda: launched.append(1), model_dir, options)
    assert launched == []


def test_key_file_that_others_can_read_is_warned_of(key_file, tmp_path, caplog):
    Access.load(key_file)
    assert caplog.messages == []
    (tmp_path / "keys.toml").chmod(0o644)
    Access.load(key_file)
    assert "chmod 600" in caplog.text


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []
    keys = [ApiKey(tenant=str(i), key=f"0123456789abcdef{i}") for i in range(5)]
    access = Access(keys)
    original = hashlib.sha256
    import hmac

    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    assert access.admit(Level.USER, b"Bearer 0123456789abcdef0", None) == "0"
    assert [a for a, _ in compared] == [original(key.key.encode()).digest() for key in keys]
    with pytest.raises(ApiError):
        access.admit(Level.USER, b"Bearer x", None)
    assert len(compared) == 10


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_loopback_names_are_served(shared, host):
    assert ask(shared, Host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost@x", ""])
def test_server_without_keys_on_loopback_is_for_its_machine_alone(shared, host):
    """A site whose name resolves to 127.0.0.1 must not reach it (DNS rebinding)."""
    status, _, answer = ask(shared, Host=host)
    assert status == 403
    assert b"--allowed-hosts" in answer


def test_server_that_everybody_can_use_says_so(start, info, key_file, caplog):
    start(ParrotLoop(info), ServerOptions(port=0, host="0.0.0.0"))
    assert "no --api-keys-file is given" in caplog.text
    caplog.clear()
    start(ParrotLoop(info), ServerOptions(port=0, host="0.0.0.0", api_keys_file=key_file))
    start(ParrotLoop(info), ServerOptions(port=0))
    assert "no --api-keys-file" not in caplog.text


def test_further_hosts_can_be_allowed_and_keys_make_the_check_needless(start, info, key_file):
    allowing = start(ParrotLoop(info), ServerOptions(port=0, allowed_hosts=("My.Example",)))
    assert ask(allowing, Host="my.example:1")[0] == 200
    assert ask(allowing, Host="other.example")[0] == 403
    keyed = start(ParrotLoop(info), ServerOptions(port=0, api_keys_file=key_file))
    assert ask(keyed, Host="other.example", x_api_key=ACME)[0] == 200


PREFLIGHT = {"access_control_request_method": "POST", "access_control_request_headers": "content-type,authorization"}


def test_pages_of_other_origins_are_not_answered_by_default(shared):
    status, headers, _ = ask(shared, "OPTIONS", "/v1/completions", origin="https://evil.example", **PREFLIGHT)
    assert status == 405
    assert not any(name.startswith("access-control") for name in headers)
    _, headers, _ = ask(shared, origin="https://evil.example")
    assert not any(name.startswith("access-control") for name in headers)


def test_pages_of_allowed_origins_are_answered_and_others_not(start, info, key_file):
    options = ServerOptions(port=0, cors_origins=("https://app.example",), api_keys_file=key_file)
    server = start(ParrotLoop(info), options)
    status, headers, _ = ask(server, "OPTIONS", "/v1/completions", origin="https://app.example", **PREFLIGHT)
    assert status == 204
    assert headers["access-control-allow-origin"] == "https://app.example"
    assert headers["access-control-allow-headers"] == "content-type,authorization"
    assert ask(server, "OPTIONS", "/v1/completions", origin="https://evil.example", **PREFLIGHT)[0] == 405
    body = {**ASK, "stream": True}
    status, headers, _ = ask(server, "POST", "/v1/completions", body, origin="https://app.example", x_api_key=ACME)
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, "https://app.example", "origin")
    status, headers, _ = ask(server, origin="https://app.example")
    assert (status, headers["access-control-allow-origin"]) == (401, "https://app.example")
    _, headers, _ = ask(server, origin="https://evil.example", x_api_key=ACME)
    assert "access-control-allow-origin" not in headers


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-out", cert, "-keyout", key], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl command to make a certificate with")
    return str(cert), str(key)


def test_server_with_a_certificate_streams_over_tls_alone(start, info, certificate, way):
    cert, key = certificate
    server = start(ParrotLoop(info), ServerOptions(port=0, tls_cert_file=cert, tls_key_file=key), **way)
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=cert)
    with contextlib.closing(http.client.HTTPSConnection(*server.address, timeout=20, context=context)) as connection:
        body = json.dumps({**ASK, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert (response.status, response.read().strip()[-12:]) == (200, b"data: [DONE]")
    plain = http.client.HTTPConnection(*server.address, timeout=20)
    plain.request("GET", "/health")
    with contextlib.closing(plain), pytest.raises((http.client.BadStatusLine, ConnectionError)):
        plain.getresponse()


def test_old_versions_of_tls_are_not_spoken(certificate):
    cert, key = certificate
    context = tls_context(ServerOptions(tls_cert_file=cert, tls_key_file=key))
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_certificate_that_cannot_be_used_stops_the_start(certificate, tmp_path):
    cert, _ = certificate
    with pytest.raises(UnusableCertificate, match="cannot be used"):
        tls_context(ServerOptions(tls_cert_file=str(tmp_path / "none.pem")))
    with pytest.raises(UnusableCertificate, match="cannot be used"):
        tls_context(ServerOptions(tls_cert_file=cert))
    assert tls_context(ServerOptions()) is None
