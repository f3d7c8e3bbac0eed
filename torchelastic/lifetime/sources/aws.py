"""AWS: the two minutes' notice of a spot instance, and the advice before it.

Protocol, from the EC2 User Guide: "Spot Instance interruption notices" (`spot/instance-action` is 404 until there is a
notice, then JSON with `action` and `time`; two minutes before, at once for "hibernate"; to be asked every 5 s),
"EC2 instance rebalance recommendations" (`events/recommendations/rebalance`, JSON with `noticeTime`), and "Use IMDSv2"
(a token by PUT, valid for at most 6 hours, shown with each request).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchelastic.lifetime.sources.metadata import (
    LINK_LOCAL,
    Answer,
    MetadataSource,
    NoAnswerError,
    Options,
    iso_seconds,
    nonsense,
    parse_json,
)
from torchelastic.lifetime.sources.notice import Event

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing.Unpack from Python 3.11 on; torch requires the package

_TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path
_TOKEN_TTL_S = 21_600
_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
#: EC2 gives notice so long before.
SPOT_LEAD_S = 120.0
_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")


def parse_instance_action(text: str) -> Event:
    """What `spot/instance-action` says: `{"action": "terminate", "time": "2026-11-21T20:15:00Z"}`.

    Raises:
        NonsenseError: it is something else.
    """
    action, date = _string(text, "action"), _string(text, "time")
    if action not in ("terminate", "stop", "hibernate"):
        raise nonsense("spot/instance-action with an unknown action", text)
    if action == "hibernate":
        return Event("interruption", "EC2 hibernates this spot instance now")
    return Event("interruption", f"EC2 will {action} this spot instance at {date}", iso_seconds(date), SPOT_LEAD_S)


def parse_rebalance(text: str, lead_s: float | None) -> Event:
    """What `events/recommendations/rebalance` says: `{"noticeTime": "2026-11-21T20:15:00Z"}`.

    Args:
        text: the body.
        lead_s: leave the machine so many seconds after the advice; None: it is advice only.

    Raises:
        NonsenseError: it is something else.
    """
    date = _string(text, "noticeTime")
    iso_seconds(date)
    reason = f"EC2 says since {date} that this spot instance is at elevated risk of interruption"
    return Event("advice", reason) if lead_s is None else Event("interruption", reason, lead_s=lead_s)


class AwsSpot(MetadataSource):
    """Spot interruption and rebalance recommendation of the instance this process runs on.

    Args:
        endpoint: of the instance metadata service.
        rebalance_lead_s: stop so many seconds after a rebalance recommendation; None: only log it, since it often is
            followed by nothing.
        options: see `metadata.Options`. Asked every 5 s, as AWS recommends.
    """

    _NAME = "AWS spot"
    _INTERVAL_S = 5.0
    _REMEDY = (
        "In a container, let the token pass one more hop: `aws ec2 modify-instance-metadata-options "
        "--http-put-response-hop-limit 2`"
    )

    def __init__(
        self, endpoint: str = LINK_LOCAL, *, rebalance_lead_s: float | None = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(endpoint, **options)
        self._rebalance_lead_s = rebalance_lead_s
        self._token = ""
        self._token_until_s = 0.0

    def _enter(self) -> None:
        self._fetch_token()

    def _fetch(self) -> list[tuple[Event, Answer]]:
        events = []
        action = self._get(_ACTION_PATH)
        if action is not None:
            events.append((parse_instance_action(action.body), action))
        rebalance = self._get(_REBALANCE_PATH)
        if rebalance is not None:
            events.append((parse_rebalance(rebalance.body, self._rebalance_lead_s), rebalance))
        return events

    def _get(self, path: str) -> Answer | None:
        if self._clock() >= self._token_until_s:
            self._fetch_token()
        try:
            answer = self._ask(path, {"X-aws-ec2-metadata-token": self._token}, accepted=(200, 404))
        except NoAnswerError:
            self._token_until_s = 0.0  # 401: it does not count any more
            raise
        return answer if answer.status == 200 else None

    def _fetch_token(self) -> None:
        asked_s = self._clock()
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        answer = self._ask(_TOKEN_PATH, headers, "PUT")
        if not _TOKEN.fullmatch(answer.body):
            raise nonsense(f"{_TOKEN_PATH} answers with something that is no token", f"{len(answer.body)} characters")
        self._token, self._token_until_s = answer.body, asked_s + _TOKEN_TTL_S / 2


def _string(text: str, key: str) -> str:
    answer = parse_json(text)
    try:
        value = answer[key]
    except (LookupError, TypeError):
        raise nonsense(f"no JSON object with {key!r}", text) from None
    if not isinstance(value, str):
        raise nonsense(f"{key!r} is no string", text)
    return value
