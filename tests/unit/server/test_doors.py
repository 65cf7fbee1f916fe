"""Who may come in, by which door: keys, names, paths, web pages, certificates."""

import shutil
import ssl
import subprocess
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from kunserve.core.config import ModelConfig, ServerConfig
from kunserve.core.errors import ConfigError
from kunserve.server.http.api_keys import ApiKeys
from kunserve.server.http.tls import check_certificates
from kunserve.server.start.command import config_from_flags, serve_command
from tests.unit.server.live_server import LiveServer, live_server

PAGE = "https://chat.example.org"
BODY = {"prompt": "ab", "max_tokens": 2}


def parsed_server(*args: str) -> ServerConfig:
    return config_from_flags(serve_command.make_context("serve", list(args)).params).server


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# the team's\nfirst\n\n  second  \n")
    return path


@pytest.fixture(scope="module")
def server(key_file: Path) -> Generator[LiveServer, None, None]:
    """A server with most doors."""
    settings = ServerConfig(
        api_key="own",
        api_key_file=str(key_file),
        allowed_origins=(PAGE,),
        root_path="/llm",
        enable_admin=True,
        shutdown_timeout_s=1.0,
    )
    with live_server(server=settings, model=ModelConfig(served_model_name=("tiny", "b"))) as one:
        yield one


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["own", "first", "second"])
def test_each_key_opens(server: LiveServer, key: str) -> None:
    with server.client() as client:
        assert client.get("/v1/models", headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("key", ["third", "# the team's", "ownfirst", "fir"])
def test_others_do_not(server: LiveServer, key: str) -> None:
    with server.client() as client:
        assert client.get("/v1/models", headers=bearer(key)).status_code == 401


def test_keys_are_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old")
    keys = ApiKeys(None, path)
    path.write_text("new\n")
    keys.reload()
    assert keys.has(b"new") and not keys.has(b"old")
    for broken in ("", "# nobody\n", "two words\n", "schlüssel\n"):
        path.write_text(broken)
        keys.reload()
        assert keys.has(b"new"), "a file with a mistake changes nothing"
    path.unlink()
    keys.reload()
    assert keys.has(b"new")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# none\n", "holds no key"),
        ("a\nb c\n", "line 2: no key has spaces"),
        ("ä", "keys are plain ASCII"),
    ],
)
def test_a_key_file_with_a_mistake_is_refused_at_start(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said) as error:
        ApiKeys(None, path)
    assert "b c" not in str(error.value), "no key is shown"
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys(None, tmp_path / "missing")


def test_a_key_file_counts_as_a_key(key_file: Path) -> None:
    assert not ServerConfig(enable_admin=True, api_key_file=str(key_file)).has_open_admin
    assert ApiKeys.of(ServerConfig()) is None


def test_every_name_is_served_and_the_first_one_answers(server: LiveServer) -> None:
    with server.client(headers=bearer("own")) as client:
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny", "b"]
        assert client.get("/v1/models/b").json()["id"] == "b"
        for name in ("tiny", "b"):
            answer = client.post("/v1/completions", json=BODY | {"model": name})
            assert answer.json()["model"] == "tiny"
            tokens = client.post("/tokenize", json={"prompt": "a", "model": name})
            assert tokens.status_code == 200
        assert client.post("/v1/completions", json=BODY | {"model": "c"}).status_code == 404


def test_several_names_on_the_command_line() -> None:
    def names(*args: str) -> tuple[str, tuple[str, ...]]:
        model = config_from_flags(serve_command.make_context("serve", list(args)).params).model
        return model.model, model.served_model_name

    assert names("m", "--served-model-name", "a", "b", "--port", "1") == ("m", ("a", "b"))
    assert names("--served-model-name", "a", "m") == ("m", ("a",)), "one name, then the model"
    with pytest.raises(ConfigError, match="must not be empty"):
        ModelConfig(served_model_name=("",))


def test_probes_of_every_platform(server: LiveServer) -> None:
    with server.client() as client:
        for path in ("/ping", "/livez", "/readyz", "/health", "/health/ready", "/health/"):
            assert client.get(path).status_code == 200, path
        assert client.post("/ping").status_code == 200
        server.configure(healthy=False, progressing=False)
        statuses = {path: client.get(path).status_code for path in ("/ping", "/livez", "/readyz")}
        server.configure(healthy=True, progressing=True)
        assert statuses == {"/ping": 503, "/livez": 200, "/readyz": 503}


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_slash_at_the_end_and_a_prefix_change_nothing(server: LiveServer, prefix: str) -> None:
    with server.client(headers=bearer("own")) as client:
        for path in ("/v1/models", "/v1/models/", "/v1/models/b/", "/kunserve/state/"):
            assert client.get(prefix + path).status_code == 200, path
        assert client.post(f"{prefix}/v1/completions/", json=BODY).status_code == 200
        assert client.get(f"{prefix}/health").status_code == 200
        assert client.get(f"{prefix}x/health").status_code == 404


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/completion", "/v1/completions"),
        ("/v1/files", None),
    ],
)
def test_a_wrong_base_url_is_recognised(server: LiveServer, path: str, meant: str | None) -> None:
    with server.client(headers=bearer("own")) as client:
        error = client.post(path, json=BODY).json()["error"]
    hint = f" Did you mean {meant}?" if meant else ""
    assert error["message"] == f"There is no '{path}' on this server.{hint}"
    assert (error["code"], error["type"]) == (404, "NotFoundError")


def test_the_page_is_found_from_the_root(server: LiveServer) -> None:
    with server.client() as client:
        for path, target in (
            ("/", "dashboard"),
            ("/llm/", "dashboard"),
            ("/llm", "llm/dashboard"),
            ("/dashboard/", "../dashboard"),
        ):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["location"]) == (307, target)
            assert client.get(path, follow_redirects=True).status_code == 200
        assert client.get("/dashboard/main.js").status_code == 200


def preflight(client: httpx.Client, path: str, origin: str = PAGE) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST"}
    return client.options(
        path, headers=asked | {"access-control-request-headers": "authorization,content-type"}
    )


def test_allowed_pages_may_call_the_api(server: LiveServer) -> None:
    with server.client() as client:
        for path in ("/v1/chat/completions", "/v1/chat/completions/", "/llm/v1/completions"):
            answer = preflight(client, path)
            assert answer.status_code == 200, "a preflight carries no key"
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "authorization" in answer.headers["access-control-allow-headers"]
        called = client.get("/v1/models", headers={"origin": PAGE, **bearer("own")})
        assert called.headers["access-control-allow-origin"] == PAGE
        assert called.headers["access-control-expose-headers"] == "x-request-id"
        refused = client.get("/v1/models", headers={"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE, "the page can read why"


def test_other_pages_may_not(server: LiveServer) -> None:
    with server.client() as client:
        answer = preflight(client, "/v1/completions", "https://evil.example")
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
        asked = {"origin": "https://evil.example", **bearer("own")}
        assert "access-control-allow-origin" not in client.get("/v1/models", headers=asked).headers


@pytest.mark.parametrize("path", ["/kunserve/drop", "/kunserve/drop/", "/llm/kunserve/drop"])
def test_no_page_gets_at_the_cluster(path: str) -> None:
    settings = ServerConfig(
        enable_admin=True, allowed_origins=("*",), root_path="/llm", shutdown_timeout_s=1.0
    )
    with live_server(server=settings) as server, server.client() as client:
        answer = preflight(client, path)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers
        asked = {"origin": PAGE, "content-type": "application/json"}
        answer = client.post(path, headers=asked)
        assert answer.status_code == 403 and server.engine.snapshot.num_drops == 0
        assert "access-control-allow-origin" not in answer.headers
        state = client.get("/kunserve/state", headers={"origin": PAGE})
        assert "access-control-allow-origin" not in state.headers


def test_origins_are_given_as_a_list_or_as_vllm_does(tmp_path: Path) -> None:
    assert parsed_server().allowed_origins == ()
    assert parsed_server("--allowed-origins", "https://a, https://b:1").allowed_origins == (
        "https://a",
        "https://b:1",
    )
    given = parsed_server("--allowed-origins", '["*"]', "--allowed-methods", "GET,POST")
    assert (given.allowed_origins, given.allowed_methods) == (("*",), ("GET", "POST"))
    file = tmp_path / "serve.yaml"
    file.write_text("allowed-origins: ['https://a']\nserved-model-name: [x, y]\nport: 1\n")
    assert parsed_server("--config", str(file)).allowed_origins == ("https://a",)
    for wrong in ("https://a/", "a.example", "https://"):
        with pytest.raises(ConfigError, match="is no origin"):
            ServerConfig(allowed_origins=(wrong,))


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="give --ssl-certfile too"):
        ServerConfig(ssl_keyfile="k")
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        ServerConfig(ssl_certfile="c", ssl_cert_reqs=2)
    with pytest.raises(ConfigError, match="must begin with a slash: /llm"):
        ServerConfig(root_path="llm")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that signed itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return cert, key


def test_tls(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    settings = ServerConfig(
        ssl_certfile=cert,
        ssl_keyfile=key,
        ssl_ca_certs=cert,
        ssl_cert_reqs=ssl.CERT_OPTIONAL,
        shutdown_timeout_s=1.0,
    )
    check_certificates(settings)
    with live_server(server=settings) as server:
        url = f"https://127.0.0.1:{server.port}"
        trusted = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=url, verify=trusted, trust_env=False) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
            streamed = client.post("/v1/completions", json=BODY | {"stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        with (
            httpx.Client(base_url=url, verify=True, trust_env=False) as client,
            pytest.raises(httpx.ConnectError, match="self-signed"),
        ):
            client.get("/health")


def test_certificates_are_tried_before_the_model_is_loaded(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = certificate
    other = tmp_path / "other.pem"
    other.write_text("no PEM at all")
    for certfile, keyfile, said in (
        (cert, str(tmp_path / "missing.pem"), "No such file"),
        (str(other), key, "PEM"),
        (cert, str(other), "PEM"),
        (cert, None, "PEM"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_certificates(ServerConfig(ssl_certfile=certfile, ssl_keyfile=keyfile))
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        check_certificates(
            ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=str(other))
        )
