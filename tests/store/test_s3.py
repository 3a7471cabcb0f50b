"""What is special about S3: credentials, clocks, conditions, checksums, parts and what they leave behind."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import structlog

from swathe.errors import ConfigError, ObjectMissingError, StoreError
from swathe.settings import S3Settings
from swathe.store import open_store
from swathe.store.s3_connection import Connection, connect
from swathe.store.s3_errors import ClockSkewError
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, unfinished_uploads

PART = 5 << 20


# --- what no attempt can cure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["read", "write", "create", "list", "stat"])
def test_a_wrong_secret_is_a_clear_error_and_never_shown(
    action: str, s3: Any, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-that-nobody-may-see")
    store = s3(endpoint_url=proxy.endpoint_url)
    calls = {
        "read": lambda: store.read("k"),
        "write": lambda: store.write("k", [b"x"]),
        "create": lambda: store.create("k", b"x"),
        "list": lambda: list(store.list("")),
        "stat": lambda: store.stat("k"),
    }
    with pytest.raises(ConfigError, match=f"bucket {BUCKET} refuses these credentials") as caught:
        calls[action]()
    assert caught.value.exit_code == 2
    assert not caught.value.retryable
    assert len([one for one in proxy.seen if one.method != "DELETE"]) == 1
    error: BaseException | None = caught.value
    while error is not None:
        assert "wrong-secret" not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__


def test_no_credentials_at_all_say_so(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match=r"Unable to locate credentials.*AWS_"):
        s3().read("k")


def test_a_missing_bucket_is_named(s3: Any) -> None:
    with pytest.raises(ConfigError, match="bucket no-such-bucket does not exist"):
        s3(url="s3://no-such-bucket/run").read("run.json")


def test_an_endpoint_that_makes_no_sense_is_a_usage_error(s3: Any) -> None:
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL_S3"):
        s3(endpoint_url="nonsense").read("k")


def test_an_unreachable_endpoint_is_worth_another_try_later(s3: Any) -> None:
    store = s3(endpoint_url="http://user:hidden@127.0.0.1:1", attempts=2)
    with pytest.raises(StoreError, match="gave up after 2 attempts") as caught:
        store.read("k")
    assert caught.value.retryable
    assert "hidden" not in str(caught.value)


def test_settings_come_from_the_environment_and_are_checked(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
    monkeypatch.setenv("SWATHE_S3__CHECKSUM", "md5")
    store = open_store(f"s3://{BUCKET}/environment")
    store.write("k", [b"x"])
    assert open_store(f"s3://{BUCKET}/environment").read("k") == b"x"
    monkeypatch.setenv("SWATHE_S3__CHECKSUM", "adler")
    with pytest.raises(ConfigError, match="SWATHE_S3__CHECKSUM"):
        open_store(f"s3://{BUCKET}/environment")


def test_stores_of_a_process_share_one_client() -> None:
    one, two = connect(S3Settings()), connect(S3Settings())
    assert one is two
    assert connect(S3Settings(concurrency=2)) is not one


def test_buckets_are_in_the_path_everywhere_but_at_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    def url(**settings: Any) -> str:
        client = Connection(S3Settings(**settings)).client()
        found = client.generate_presigned_url("get_object", Params={"Bucket": "bkt", "Key": "k"})
        client.close()
        return str(found).partition("?")[0]

    assert url() == "https://bkt.s3.amazonaws.com/k"
    assert url(addressing="path") == "https://s3.amazonaws.com/bkt/k"
    assert url(endpoint_url="https://minio.example") == "https://minio.example/bkt/k"
    assert (
        url(endpoint_url="https://r2.example", addressing="virtual") == "https://bkt.r2.example/k"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://ceph.example")
    assert url() == "https://ceph.example/bkt/k"


# --- clocks and credentials -----------------------------------------------------------------------------------------


def test_clock_skew_has_its_own_message_and_is_not_tried_again(s3: Any, proxy: FaultProxy) -> None:
    store = s3(endpoint_url=proxy.endpoint_url)
    proxy.inject(Fault("skewed", times=100))
    with pytest.raises(ClockSkewError, match=r"clock is 7\d\d\d s ahead of the store's") as caught:
        store.write("k", [b"x"])
    assert (
        caught.value.retryable
    )  # the range is not consumed: it comes back when the clock is right
    assert len(proxy.seen) == 1


def test_expired_credentials_are_asked_for_again(
    s3: Any, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    form = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    file.write_text(form.format("old-access-key", "old"))
    store = s3(endpoint_url=proxy.endpoint_url, attempts=1000, conditional_create="on")
    proxy.inject(Fault("expired", times=100_000))
    done = threading.Thread(target=store.write, args=("k", [b"x"]))
    done.start()
    while not proxy.seen:
        time.sleep(0.01)
    file.write_text(form.format(ACCESS_KEY, SECRET_KEY))
    while f"Credential={ACCESS_KEY}/" not in proxy.seen[-1].headers["Authorization"]:
        time.sleep(0.01)
    proxy.clear()
    done.join()
    assert store.read("k") == b"x"


# --- conditions -----------------------------------------------------------------------------------------------------


def test_a_repeated_create_that_meets_its_own_object_has_won(s3: Any, proxy: FaultProxy) -> None:
    store = s3(endpoint_url=proxy.endpoint_url, conditional_create="on")
    proxy.inject(Fault("lost answer", method="PUT", times=2))
    assert store.create("k", b"mine")
    assert not store.create("k", b"another's")


def test_a_repeated_create_that_meets_anothers_object_has_lost(s3: Any, proxy: FaultProxy) -> None:
    store = s3(endpoint_url=proxy.endpoint_url, conditional_create="on")
    assert store.create("k", b"another's")
    proxy.inject(Fault("lost answer", method="PUT"))
    assert not store.create("k", b"mine")
    assert store.read("k") == b"another's"


def test_a_store_that_ignores_conditions_is_found_out_and_told_once(s3: Any) -> None:
    store = s3()

    def ignore(request: Any, **_: Any) -> None:
        del request.headers["If-None-Match"]

    store._connection.client().meta.events.register("before-sign.s3.PutObject", ignore)
    with structlog.testing.capture_logs() as logs:
        assert store.create("k", b"first")
        assert not store.create("k", b"second")
        assert store.create("l", b"third")
    assert len([one for one in logs if "If-None-Match" in one["event"]]) == 1
    assert store.read("k") == b"first"
    assert {item.key for item in store.list("")} == {"k", "l"}


def test_conditions_can_be_turned_off(s3: Any, proxy: FaultProxy) -> None:
    store = s3(endpoint_url=proxy.endpoint_url, conditional_create="off")
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert not any("If-None-Match" in one.headers for one in proxy.seen)


# --- listing --------------------------------------------------------------------------------------------------------


def test_listings_page(s3: Any, plain: Any) -> None:
    store = s3()
    events = store._connection.client().meta.events
    events.register(
        "before-parameter-build.s3.ListObjectsV2",
        lambda params, **_: params.__setitem__("MaxKeys", 3),
    )
    events.register(
        "before-parameter-build.s3.ListMultipartUploads",
        lambda params, **_: params.__setitem__("MaxUploads", 2),
    )
    keys = {f"states/{number:06d}.json" for number in range(10)}
    for key in keys:
        store.write(key, [b"x"])
    assert {item.key for item in store.list("states/")} == keys
    root = store.url.partition(f"{BUCKET}/")[2]
    for number in range(5):
        plain.create_multipart_upload(Bucket=BUCKET, Key=f"{root}/states/{number}")
    assert store.collect(older_than_s=-60) == 5
    assert unfinished_uploads(plain, store.url) == []


def test_other_runs_of_the_bucket_are_not_seen(s3: Any) -> None:
    one = s3(url=f"s3://{BUCKET}/runs/a")
    two = s3(url=f"s3://{BUCKET}/runs/ab")
    two.write("k", [b"x"])
    assert list(one.list("")) == []
    with pytest.raises(ObjectMissingError):
        one.read("k")


# --- processes ------------------------------------------------------------------------------------------------------


def test_a_forked_child_makes_a_client_of_its_own(s3: Any, server: S3Server) -> None:
    program = """
import os, sys
from swathe.store import open_store
store = open_store(sys.argv[1])
store.write("parent", [b"x"])
child = os.fork()
if child == 0:
    store.write("child", [b"y"])
    assert store._connection.sessions == 2
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.read("child") == b"y"
assert store._connection.sessions == 1
"""
    environment = os.environ | {"AWS_ENDPOINT_URL_S3": server.endpoint_url}
    url = s3().url
    subprocess.run([sys.executable, "-c", program, url], check=True, env=environment)


def test_importing_the_store_asks_nothing() -> None:
    program = """
import sys
import swathe.store.s3_errors, swathe.store.s3
from swathe.store.s3_connection import _connections
assert not _connections
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
