#!/usr/bin/env bash
# Makes the certificates of the tests again; needs openssl. They are valid for a hundred years.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
days=36500
authority() { # FOLDER NAME
    mkdir -p "$1"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days $days -subj "/CN=$2" \
        -addext keyUsage=critical,keyCertSign,cRLSign -keyout "$work/$2.key" -out "$1/ca-cert.pem" 2>/dev/null
}
issue() { # AUTHORITY CA_CERT NAME SUBJECT EXTENSIONS [DAYS-OPTION]
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "$4" \
        -keyout "$3-key.pem" -out "$work/csr" 2>/dev/null
    printf '%b' "$5" > "$work/ext"
    openssl x509 -req -in "$work/csr" -CA "$2" -CAkey "$work/$1.key" -CAcreateserial -extfile "$work/ext" \
        ${6:--days $days} -out "$3-cert.pem" 2>/dev/null
}
SERVER='subjectAltName=DNS:localhost,DNS:disks.example,IP:127.0.0.1,IP:::1\nextendedKeyUsage=serverAuth\n'
CLIENT='subjectAltName=DNS:alice.example,email:alice@example.org,URI:spiffe://example.org/alice\nextendedKeyUsage=clientAuth\n'
authority . udm-test-ca
issue udm-test-ca ca-cert.pem server /CN=disks "$SERVER"
issue udm-test-ca ca-cert.pem client /CN=alice "$CLIENT"
mkdir -p bob renewed stranger expired
issue udm-test-ca ca-cert.pem bob/client /CN=bob 'extendedKeyUsage=clientAuth\n'
cp ca-cert.pem bob
issue udm-test-ca ca-cert.pem renewed/server /CN=renewed "$SERVER"
cp ca-cert.pem renewed
issue udm-test-ca ca-cert.pem expired/server /CN=expired "$SERVER" '-days -1'
cp ca-cert.pem expired
authority stranger another-ca
issue another-ca stranger/ca-cert.pem stranger/client /CN=alice "$CLIENT"
issue another-ca stranger/ca-cert.pem stranger/server /CN=disks "$SERVER"
# The certificate of bob is revoked in revoked/.
mkdir -p revoked
cp ca-cert.pem server-cert.pem server-key.pem revoked
touch "$work/index"
echo 01 > "$work/crlnumber"
printf '[ca]\ndefault_ca=d\n[d]\ndatabase=%s\ncrlnumber=%s\ndefault_md=sha256\ndefault_crl_days=%s\n' \
    "$work/index" "$work/crlnumber" $days > "$work/ca.cnf"
openssl ca -config "$work/ca.cnf" -cert ca-cert.pem -keyfile "$work/udm-test-ca.key" -revoke bob/client-cert.pem 2>/dev/null
openssl ca -config "$work/ca.cnf" -cert ca-cert.pem -keyfile "$work/udm-test-ca.key" -gencrl -out revoked/ca-crl.pem 2>/dev/null
rm -f ./*.srl stranger/*.srl
