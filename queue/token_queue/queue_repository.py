"""All SQL about messages.

As in the cron core, the time is an argument: NULL means the database's clock. A claim is a worker and an attempt, so
that a worker which took its own message over again is not confused with itself.
"""

import json
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from cron_ticks.database import Database
from token_queue.message import Message

LONGEST_ERROR = 10_000

# The queue's part of the firing statement: a message per taken tick, with the tick's ULID.
INSERT_FROM_TAKEN = """
    INSERT INTO {schema}.queue_messages
        (id, queue_name, workspace_id, payload, headers, schedule_id, scheduled_for, process_after, inserted_at)
    SELECT 'msg_' || substr(taken.id, 6), taken.queue_name, taken.workspace_id, taken.payload,
        jsonb_build_object(
            'schedule_id', taken.schedule_id,
            'schedule_name', taken.schedule_name,
            'scheduled_for', to_char(taken.scheduled_for AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
            'tick_id', taken.id,
            'ticker_id', pass.ticker_id,
            'origin', 'schedule'),
        taken.schedule_id, taken.scheduled_for, pass.instant, pass.instant
    FROM taken, pass
"""

# Takes due messages of the queues that this process handles, earliest first. One bounded index scan per queue, so a
# backlog elsewhere costs nothing. The attempt counts from here: a worker that dies has used it. Messages that this
# process still works on are left out, even if their claim ran out.
CLAIM_MESSAGES = """
WITH clock AS (SELECT coalesce($5::timestamptz, statement_timestamp()) AS instant),
due AS (
    SELECT pending.id
    FROM unnest($1::text[]) AS handled (queue_name)
    CROSS JOIN LATERAL (
        SELECT id, process_after
        FROM {schema}.queue_messages AS message
        WHERE message.queue_name = handled.queue_name
            AND completed_at IS NULL AND dlq_at IS NULL
            AND process_after <= (SELECT instant FROM clock)
            AND id <> ALL ($6::text[])
        ORDER BY process_after
        LIMIT $3
        FOR UPDATE SKIP LOCKED
    ) AS pending
    ORDER BY pending.process_after
    LIMIT $3
)
UPDATE {schema}.queue_messages AS message
SET claimed_by = $2, process_after = clock.instant + $4::interval, attempts = attempts + 1
FROM due, clock
WHERE message.id = due.id
RETURNING message.id, queue_name, workspace_id, payload::text AS payload, headers::text AS headers, attempts
"""

# Keeps claims in use; what doesn't come back was taken over by another process.
RENEW_CLAIMS = """
UPDATE {schema}.queue_messages AS message
SET process_after = coalesce($4::timestamptz, statement_timestamp()) + $3::interval
FROM unnest($1::text[], $5::int[]) AS held (id, attempt)
WHERE message.id = held.id AND message.attempts = held.attempt
    AND claimed_by = $2 AND completed_at IS NULL AND dlq_at IS NULL
RETURNING message.id
"""

# Only the claim's owner can end the message, and only as long as the attempt is the one that it claimed.
COMPLETE_MESSAGE = """
UPDATE {schema}.queue_messages
SET completed_at = coalesce($3::timestamptz, statement_timestamp()), claimed_by = NULL
WHERE id = $1 AND claimed_by = $2 AND attempts = $4 AND completed_at IS NULL
RETURNING true
"""

# Tried again after a pause, or dead when its attempts are used up.
FAIL_MESSAGE = """
UPDATE {schema}.queue_messages
SET last_error = $3, claimed_by = NULL,
    process_after = coalesce($6::timestamptz, statement_timestamp()) + $5::interval,
    dlq_at = CASE WHEN attempts >= $4 THEN coalesce($6::timestamptz, statement_timestamp()) END
WHERE id = $1 AND claimed_by = $2 AND attempts = $7 AND completed_at IS NULL
RETURNING true
"""

# Given back untried by a worker that stops: due again at once, and the attempt doesn't count.
RELEASE_MESSAGE = """
UPDATE {schema}.queue_messages
SET claimed_by = NULL, attempts = attempts - 1, process_after = coalesce($3::timestamptz, statement_timestamp())
WHERE id = $1 AND claimed_by = $2 AND attempts = $4 AND completed_at IS NULL
RETURNING true
"""


class QueueSink:
    """Our own queue as a sink of the cron."""

    insert_from_taken = INSERT_FROM_TAKEN


class QueueRepository:
    """Messages in the database, as one ticker claims and ends them."""

    def __init__(self, database: Database, ticker_id: str) -> None:
        self._database = database
        self._ticker_id = ticker_id

    async def claim(
        self,
        queues: Sequence[str],
        *,
        limit: int,
        lease: timedelta,
        except_ids: Collection[str] = (),
        now: datetime | None = None,
    ) -> list[Message]:
        """Claim due messages for the length of a lease."""
        arguments = (queues, self._ticker_id, limit, lease, now, list(except_ids))
        return [
            Message(
                id=row["id"],
                queue_name=row["queue_name"],
                workspace_id=row["workspace_id"],
                payload=json.loads(row["payload"]),
                headers=json.loads(row["headers"]),
                attempt=row["attempts"],
            )
            for row in await self._database.fetch(CLAIM_MESSAGES, *arguments)
        ]

    async def renew(self, messages: Collection[Message], *, lease: timedelta, now: datetime | None = None) -> set[str]:
        """Renew claims; the ids of those that are still ours."""
        ids, attempts = [message.id for message in messages], [message.attempt for message in messages]
        rows = await self._database.fetch(RENEW_CLAIMS, ids, self._ticker_id, lease, now, attempts)
        return {row["id"] for row in rows}

    async def complete(self, message: Message, *, now: datetime | None = None) -> bool:
        """End the message; False if it is no longer ours."""
        return await self._end(COMPLETE_MESSAGE, message.id, self._ticker_id, now, message.attempt)

    async def fail(
        self, message: Message, error: str, *, max_attempts: int, retry_in: timedelta, now: datetime | None = None
    ) -> bool:
        """Note the error and let the message be tried again, or bury it; False if it is no longer ours."""
        text = storable(error)
        return await self._end(
            FAIL_MESSAGE, message.id, self._ticker_id, text, max_attempts, retry_in, now, message.attempt
        )

    async def release(self, message: Message, *, now: datetime | None = None) -> bool:
        """Give the claim back untried; False if it is no longer ours."""
        return await self._end(RELEASE_MESSAGE, message.id, self._ticker_id, now, message.attempt)

    async def _end(self, statement: str, *arguments: object) -> bool:
        return await self._database.fetchval(statement, *arguments) is not None


def storable(text: str) -> str:
    """A text that PostgreSQL can keep: no NUL, no lone surrogates, not endless."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()[:LONGEST_ERROR]
