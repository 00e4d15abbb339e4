"""What every body has in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
FinishReason = Literal["stop", "length", "cancelled"]


class Message(BaseModel):
    """Base of all bodies: immutable, lenient towards unknown fields, strict about types (no `"1"` for 1)."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")


class Empty(Message):
    """A body without fields."""
