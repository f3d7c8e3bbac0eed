"""Both ends prove to each other that they know the token; the token itself never travels and is never logged.

A challenge and response with HMAC-SHA256 over two fresh random numbers and the prover's role, so that neither an old
answer nor the other end's own answer is of any use. It keeps strangers out; what follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from torchelastic.checkpoint.replication.errors import AuthenticationError, ProtocolError
from torchelastic.checkpoint.replication.wire import PROTOCOL, Connection, Message, error_message, text_in

#: Strangers may make us read no more than this.
MOST_GREETING_BYTES = 1024
LEAST_TOKEN_CHARACTERS = 16


def token_bytes(token: str) -> bytes:
    """The token as a key.

    Raises:
        ValueError: it is too short to be one.
    """
    if len(token) < LEAST_TOKEN_CHARACTERS:
        raise ValueError(
            f"the token has {len(token)} characters; at least {LEAST_TOKEN_CHARACTERS} are needed, of a random one "
            f"that all members share (secrets.token_hex(32))"
        )
    return token.encode()


def proof_of(token: bytes, role: str, server_nonce: str, client_nonce: str) -> str:
    """What only somebody who knows the token can answer to these two numbers in this role. Pure."""
    return hmac.new(token, "\n".join((PROTOCOL, role, server_nonce, client_nonce)).encode(), hashlib.sha256).hexdigest()


def greet_client(connection: Connection, token: bytes) -> None:
    """The server's part.

    Raises:
        AuthenticationError: the client does not know the token; it was told so.
        TransferError: it is silent, gone, or no client of ours.
    """
    server_nonce = secrets.token_hex(16)
    connection.send({"protocol": PROTOCOL, "nonce": server_nonce})
    answer = connection.receive(most_bytes=MOST_GREETING_BYTES)
    client_nonce = _nonce_in(answer)
    if not _is_equal(text_in(answer, "proof"), proof_of(token, "client", server_nonce, client_nonce)):
        error = AuthenticationError(
            "authentication failed: the client's token is not the one of this server; give both the token of their run"
        )
        connection.send(error_message(error))
        raise error
    connection.send({"proof": proof_of(token, "server", server_nonce, client_nonce)})


def greet_server(connection: Connection, token: bytes) -> None:
    """The client's part.

    Raises:
        AuthenticationError: the server does not accept our token, or does not know it itself.
        TransferError: it is silent, gone, or no server of ours.
    """
    greeting = connection.receive(most_bytes=MOST_GREETING_BYTES)
    if greeting.get("protocol") != PROTOCOL:
        raise ProtocolError(f"{connection.peer} does not speak {PROTOCOL}; run the same release on all hosts")
    server_nonce, client_nonce = _nonce_in(greeting), secrets.token_hex(16)
    connection.send({"nonce": client_nonce, "proof": proof_of(token, "client", server_nonce, client_nonce)})
    # a refusal may be a few words longer than a proof
    answer = connection.receive(most_bytes=MOST_GREETING_BYTES)
    if not _is_equal(text_in(answer, "proof"), proof_of(token, "server", server_nonce, client_nonce)):
        raise AuthenticationError(f"{connection.peer} does not know this run's token: it is not one of our servers")


def _nonce_in(message: Message) -> str:
    nonce = text_in(message, "nonce")
    if not re.fullmatch(r"[0-9a-f]{32}", nonce):
        raise ProtocolError("sent no nonce of 32 hexadecimal digits")
    return nonce


def _is_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
