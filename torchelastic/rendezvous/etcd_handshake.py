"""Why a connection to etcd fails before its first call: gRPC says "Socket closed", here it is said what to change.

Asked only after gRPC has failed. One more connection is made by Python's own TLS, which tells what it did not like.
"""

from __future__ import annotations

import socket
import ssl

from torchelastic.rendezvous.credentials import Credentials
from torchelastic.text import host_port

#: A frame without content, with which both sides of HTTP/2 begin (RFC 9113, 3.4), and where its kind is.
_SETTINGS, _KIND = b"\0\0\0\4\0\0\0\0\0", slice(3, 4)


def why_no_handshake(host: str, port: int, credentials: Credentials, timeout_s: float) -> str | None:
    """What keeps this client and that etcd from understanding each other; None: it is not TLS, or not to be found out.

    Args:
        host: Of the endpoint.
        port: Of it.
        credentials: As used for gRPC.
        timeout_s: The longest each of two attempts may take.
    """
    try:
        if credentials.ca_cert is None:
            because = _why_not_in_clear(host, port, timeout_s)
        else:
            because = _why_not_by_tls(host, port, credentials, timeout_s)
    except OSError:
        return None  # nobody there, or too slow to tell
    return None if because is None else f"etcd at {host_port(host, port)} {because}"


def _why_not_in_clear(host: str, port: int, timeout_s: float) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent: only who answers is asked
    try:
        with _connected(host, port, timeout_s) as plain, context.wrap_socket(plain):
            pass
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return _why_no_etcd(host, port, timeout_s)
    except ConnectionResetError:
        return _why_no_etcd(host, port, timeout_s)
    return (
        "speaks TLS and this client does not: give cacert=FILE (--etcd-cacert), the authority that signed its "
        "certificate"
    )


def _why_not_by_tls(host: str, port: int, credentials: Credentials, timeout_s: float) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(credentials.ca_cert)
    except ssl.SSLError:
        return (
            f"needs cacert, and there is no certificate in {credentials.ca_cert!r}: give the PEM file of its authority"
        )
    if credentials.cert_cert is not None:
        try:
            context.load_cert_chain(credentials.cert_cert, credentials.cert_key, password="")
        except ssl.SSLError as error:
            verb = "does not belong to" if "MISMATCH" in (error.reason or "") else "cannot be used with"
            return (
                f"cannot be shown a client certificate: the private key {credentials.cert_key!r} {verb} the "
                f"certificate {credentials.cert_cert!r}"
            )
    try:
        with (
            _connected(host, port, timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            secured.recv(1)  # since TLS 1.3 a server refuses the client's certificate after the client's handshake
    except ssl.SSLCertVerificationError as error:
        return (
            f"shows a certificate that does not hold ({error.verify_message}): give the right cacert, now "
            f"{credentials.ca_cert!r}, or renew etcd's certificate, which must name this host"
        )
    except ssl.SSLError as error:
        if "ALERT" in (error.reason or ""):
            return _why_refused(credentials, str(error.reason))
        return _why_no_tls(host, port, timeout_s)
    except ConnectionResetError:
        return _why_no_tls(host, port, timeout_s)
    return None


def _why_refused(credentials: Credentials, reason: str) -> str:
    if credentials.cert_cert is None:
        return "wants a client certificate: give cert=FILE and key=FILE (--etcd-cert, --etcd-key)"
    return (
        f"refuses the client certificate {credentials.cert_cert!r} ({reason}): it has expired, or etcd's "
        f"--trusted-ca-file did not sign it; see `openssl x509 -noout -dates -issuer -in {credentials.cert_cert}`"
    )


def _why_no_tls(host: str, port: int, timeout_s: float) -> str | None:
    """Whether the other end understands HTTP without TLS, as an etcd does that was started with http:// URLs."""
    with _connected(host, port, timeout_s) as plain:
        plain.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        if not plain.recv(16).startswith(b"HTTP/1.0 200"):
            return None
    return (
        "does not speak TLS: leave out cacert, cert and key (protocol=http says so against the "
        "environment), or start etcd with https:// URLs"
    )


def _why_no_etcd(host: str, port: int, timeout_s: float) -> str | None:
    """Whether the other end answers in another language than gRPC's, which is HTTP/2."""
    with _connected(host, port, timeout_s) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
        answer = plain.recv(len(_SETTINGS))
        if answer[_KIND] in (_SETTINGS[_KIND], b""):
            return None
    return "does not speak as etcd does: another program listens there; give the port of etcd, 2379 by default"


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    return socket.create_connection((host, port), timeout_s)
