#!/bin/bash
# Makes the certificates with which etcd and the hosts of a run show each other who they are:
#
#     deploy/tls/make-certs.sh [--days N] [--client NAME] FOLDER HOST [HOST ..]
#
# HOST: every name or address by which clients or other members reach etcd, e.g. etcd-a etcd-b.example 10.0.0.7.
# --client NAME: common name of the client's certificate (default "client"); etcd takes it for the user.
# --days N: how long they hold (default 365); the authority holds ten times as long.
#
# A FOLDER that has an authority already (ca.pem, ca.key) keeps it: more clients, or renewed certificates once the old
# ones are moved away. Nothing is ever overwritten.
set -euo pipefail

fail() { echo "make-certs.sh: $*" >&2; exit 1; }

days=365
client=client
while [ $# -gt 0 ]; do
    case $1 in
    --days | --client)
        [ $# -ge 2 ] || fail "$1 wants a value"
        if [ "$1" = --days ]; then days=$2; else client=$2; fi
        shift 2 ;;
    -*) fail "there is no option $1: give [--days N] [--client NAME] FOLDER HOST [HOST ..]" ;;
    *) break ;;
    esac
done
[ $# -ge 2 ] || fail "give [--days N] [--client NAME] FOLDER HOST [HOST ..], as in: make-certs.sh tls etcd-a 10.0.0.7"
[[ $days =~ ^[1-9][0-9]{0,3}$ ]] || fail "--days is '$days': give 1 to 9999"
[[ $client =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$ ]] || fail "--client is '$client': letters, digits, '.', '_' and '-'"
[[ ! $client =~ ^(ca|server)$ ]] || fail "--client is '$client', which is the name of another file"
command -v openssl > /dev/null || fail "the command openssl is not there: install it"

folder=$1
shift
names=
for host in "$@"; do
    if [[ $host =~ ^[0-9]+(\.[0-9]+){3}$ || $host =~ ^[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*$ ]]; then kind=IP; else kind=DNS; fi
    if [ $kind = DNS ] && ! [[ $host =~ ^(\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$ ]]; then
        fail "'$host' is no host name and no address: give them without scheme and port"
    fi
    names=$names${names:+,}$kind:$host
done

makes="server.pem server.key $client.pem $client.key"
has_authority=no
if [ -e "$folder/ca.pem" ] && [ -e "$folder/ca.key" ]; then has_authority=yes; else makes="ca.pem ca.key $makes"; fi
# for one more client the server's pair stays; it must be whole, and is then no longer asked for
if [ $has_authority = yes ] && [ -e "$folder/server.pem" ] && [ -e "$folder/server.key" ]; then
    makes="$client.pem $client.key"
fi
for file in $makes; do
    [ ! -e "$folder/$file" ] || fail "$folder/$file is there already, nothing was made: move it away, or choose another folder"
done

umask 077
mkdir -p "$folder"
work=$(mktemp -d "$folder/.making-XXXXXX")
trap 'rm -rf "$work"' EXIT
quietly() { openssl "$@" 2> "$work/complaint" || fail "openssl $1 has failed: $(tail -n 3 "$work/complaint")"; }
new_key() { quietly genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

# the machine's own openssl.cnf is left out: what it adds differs
printf '[req]\ndistinguished_name=dn\nprompt=no\n[dn]\nCN=torchelastic authority\n' > "$work/ca.cnf"
printf '[ext]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n' \
    >> "$work/ca.cnf"
if [ $has_authority = yes ]; then
    cp "$folder/ca.pem" "$folder/ca.key" "$work"
else
    new_key "$work/ca.key"
    quietly req -x509 -new -sha256 -config "$work/ca.cnf" -extensions ext -key "$work/ca.key" \
        -days $((days * 10)) -out "$work/ca.pem"
fi

issue() { # NAME COMMON_NAME USAGE SUBJECT_ALTERNATIVE_NAMES
    printf '[req]\ndistinguished_name=dn\nprompt=no\n[dn]\nCN=%s\n' "$2" > "$work/request.cnf"
    printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=%s\n' "$3" > "$work/ext"
    printf 'subjectAltName=%s\n' "$4" >> "$work/ext"
    new_key "$work/$1.key"
    quietly req -new -sha256 -config "$work/request.cnf" -key "$work/$1.key" -out "$work/request"
    quietly x509 -req -sha256 -in "$work/request" -CA "$work/ca.pem" -CAkey "$work/ca.key" \
        -set_serial "0x$(openssl rand -hex 15)" -days "$days" -extfile "$work/ext" -out "$work/$1.pem"
}

# members of etcd are each other's clients
case $makes in *server.pem*) issue server "etcd" serverAuth,clientAuth "$names" ;; esac
issue "$client" "$client" clientAuth "DNS:$client"

for file in $makes; do
    case $file in *.pem) chmod 644 "$work/$file" ;; esac
    mv -n "$work/$file" "$folder/$file"
done

cat << END
made in $folder: $makes
keep $folder/ca.key away from the machines of the run: who has it makes certificates

etcd --cert-file=$folder/server.pem --key-file=$folder/server.key \\
     --client-cert-auth --trusted-ca-file=$folder/ca.pem
  and with several members, besides:
     --peer-cert-file=$folder/server.pem --peer-key-file=$folder/server.key \\
     --peer-client-cert-auth --peer-trusted-ca-file=$folder/ca.pem

torchelastic run --etcd-cacert=$folder/ca.pem --etcd-cert=$folder/$client.pem --etcd-key=$folder/$client.key ..
END
