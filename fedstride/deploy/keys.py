"""Certificates and keys for a federation: an authority of its own, the server's certificate, and one key a node.

The folder stays with whoever runs the server. A node gets three things: ca.crt, and its own node-K and node-K.pub.
"""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedstride.checkpoint import make_folder
from fedstride.errors import FedstrideError

DAYS = 365
AUTHORITY = "fedstride authority"


def write(folder: Path, clients: int, hosts: list[str]) -> None:
    """Make everything for so many nodes; `hosts` are the names and addresses by which nodes reach the server."""
    if (folder / "ca.crt").exists():
        raise FedstrideError(f"{folder} already holds keys; choose another folder")
    make_folder(folder)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _certificate(AUTHORITY, authority, authority, authority=True)
    own = _certificate("fedstride server", server, authority, hosts=hosts)
    _secret(folder / "ca.key", _pem(authority))
    _secret(folder / "server.key", _pem(server))
    for name, certificate in (("ca.crt", root), ("server.crt", own)):
        (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for number in range(clients):
        node = ec.generate_private_key(ec.SECP384R1())
        encoding, form = serialization.Encoding, serialization.PrivateFormat
        _secret(folder / f"node-{number}", node.private_bytes(encoding.PEM, form.OpenSSH, serialization.NoEncryption()))
        public = node.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"node-{number}.pub").write_bytes(public + b"\n")


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey,
    authority: bool = False, hosts: list[str] | None = None,
) -> x509.Certificate:  # fmt: skip
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)  # clocks differ a little
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(AUTHORITY))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _name(words: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _secret(path: Path, data: bytes) -> None:
    """A file that only its owner can read, from the first moment on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
