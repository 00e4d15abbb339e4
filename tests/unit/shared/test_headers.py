"""Errors and budgets in headers."""

from __future__ import annotations

import pytest

from shared import headers
from shared.errors import Busy, Internal, KvrelayError, Stale, Timeout, TooLarge


@pytest.mark.parametrize(
    "error", [Busy("full", retry_after_s=0.25), Stale("old"), Timeout("late"), TooLarge("long"), Internal("hm")]
)
def test_an_error_comes_back_as_it_was(error: KvrelayError) -> None:
    found = headers.to_error(headers.from_error(error))
    assert type(found) is type(error)
    assert (found.text, found.retry_after_s) == (error.text, error.retry_after_s)


def test_an_error_of_a_foreign_service_is_told_by_its_code() -> None:
    assert isinstance(headers.to_error({"Nats-Service-Error-Code": "429", "Nats-Service-Error": "slow"}), Busy)
    assert isinstance(headers.to_error({"nats-service-error-code": "777"}), Internal)
    assert headers.to_error({"traceparent": "x"}) is None
    assert headers.to_error(None) is None


def test_an_unknown_kind_of_a_newer_peer_is_internal() -> None:
    assert isinstance(headers.to_error({"Nats-Service-Error-Code": "418", "kvrelay-error": "Teapot"}), Internal)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "9" * 30, "１"])
def test_a_nonsensical_budget_is_no_budget(text: str) -> None:
    assert headers.timeout_s({"kvrelay-timeout-ms": text}) is None


def test_header_names_are_found_in_any_case() -> None:
    assert headers.timeout_s({"Kvrelay-Timeout-Ms": "1500"}) == 1.5
