"""Secrets are redacted in output and refused in configurations; ordinary words stay."""

import json
import logging
import stat
from pathlib import Path

import pytest

from moebius.cli.console import print_message
from moebius.cluster.job import Journal, State
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import ConfigError
from moebius.train.metrics.log import MetricsLog
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.redaction import BLOT, RedactingFilter, redact, redact_values
from moebius.train.record.run_folder import open_run

SECRETS = {
    "s3://user:pass/word@bucket/x": None,
    "https://me:hunter2@host/data": "hunter2",
    "postgres://u:p@ss@h": None,
    "AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
    "hf_abcdefghijklmnopqrstuvwx": "hf_abcdefghijklmnopqrstuvwx",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789": "ghp_abcdefghijklmnop",
    "Authorization: Bearer abcdef1234567890": "abcdef1234567890",
    "https://h/x?sig=abc123def&v=2": "abc123def",
    "https://h/x?X-Amz-Signature=0123456789abcdef": "0123456789abcdef",
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG": "wJalrXUtnFEMI",
    '{"password": "correct horse"}': "correct",
}
ORDINARY = (
    "s3://bucket/key/with:colon@sign",
    "the token at step 5 of 10: tokenizer=bpe",
    "https://host:8080/path",
    "rank 0 on node 1 exited with code 1 (Gloo [1.2.3.4]:5678)",
    "mesh.ep=4 top_k=2 key=value",
    "file::/a/b@2x.png",
)


@pytest.mark.parametrize("text", [text for text, secret in SECRETS.items() if secret])
def test_what_is_a_secret_by_its_form(text: str) -> None:
    redacted = redact(f"before {text} after", {})
    assert BLOT in redacted
    assert str(SECRETS[text]) not in redacted
    assert redacted.startswith("before ")
    assert redact(redacted, {}) == redacted


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_words_stay(text: str) -> None:
    assert redact(text, {"RAY_AUTH_MODE": "token", "SOME_KEY": "ep=4"}) == text


def test_values_of_variables_whose_names_say_so() -> None:
    environment = {
        "MY_API_KEY": "opensesame",
        "LONG_TOKEN": "opensesame-and-more",
        "DB_PASSWORD": "short",
        "RAY_AUTH_TOKEN_PATH": "/somewhere/token",
        "HOME": "/somewhere/home",
    }
    text = "opensesame-and-more opensesame short /somewhere/token /somewhere/home"
    assert redact(text, environment) == f"{BLOT} {BLOT} short /somewhere/token /somewhere/home"
    values = {"a": ["opensesame", 1, None], "opensesame": True}
    assert redact_values(values, environment) == {"a": [BLOT, 1, None], BLOT: True}


@pytest.mark.parametrize(
    "override",
    [
        "prepare.input=['s3://AKIAIOSFODNN7EXAMPLE:secretsecret@bucket/x.txt']",
        "checkpoint.copy_to=https://me:hunter2@host/x",
        "data.directory=/data/opensesame/x",
    ],
)
def test_a_configuration_holds_no_secret(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "opensesame")
    with pytest.raises(ConfigError) as caught:
        resolve("smoke", [override], RECIPES)
    place = override.partition("=")[0]
    assert f"{place}: holds what looks like a secret" in str(caught.value)
    for secret in ("secretsecret", "hunter2", "opensesame"):
        assert secret not in str(caught.value)


def test_what_is_written_holds_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MY_SECRET", "opensesame")
    Journal(tmp_path).append(
        State.FAILED,
        generation=1,
        reason="403 for opensesame",
        details={"root_cause": {"summary": "x", "traceback": "s3://a:opensesame@b"}},
    )
    log = MetricsLog(tmp_path, active=True)
    log.write("checkpoint", 1, error="opensesame was refused")
    log.close()
    print_message("error", "opensesame [/x]")
    caplog.handler.addFilter(RedactingFilter())
    logging.getLogger("any").warning("said %s", "opensesame")
    (entry,) = Journal(tmp_path).entries()
    assert entry.reason == f"403 for {BLOT}"
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["error"] == f"{BLOT} was refused"
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"opensesame" in content for content in written)
    assert "opensesame" not in capsys.readouterr().err + caplog.text


def test_a_new_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    open_run(RECIPES["smoke"](), tmp_path / "runs" / "mine")
    assert stat.S_IMODE((tmp_path / "runs" / "mine").stat().st_mode) == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    open_run(RECIPES["smoke"](), shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o750  # somebody's decision


@pytest.mark.parametrize("name", ["a/b", "..", "a\nb", "", "x" * 101, "-a", "a b", "a;b", "ä"])
def test_a_jobs_name_is_no_path_and_no_command(name: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.name"):
        resolve("smoke", [f"job.name={json.dumps(name)}"], RECIPES)
