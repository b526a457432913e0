"""Reads sidecars with the in-toto-attestation package, as any standard tool would.

  in_toto_check.py SIDECAR...   prints one digest per sidecar; exit status 77 without the package
"""
import json
import sys

try:
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1 import statement_pb2
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)

for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        raw = json.loads(file.read())
    message = json_format.Parse(json.dumps(raw), statement_pb2.Statement())
    statement = Statement.copy_from_pb(message)
    statement.validate()
    # Strict: a field that SLSA v1 does not know is an error here.
    provenance = json_format.ParseDict(raw["predicate"], provenance_pb2.Provenance())
    assert provenance.build_definition.build_type and provenance.run_details.builder.id
    assert provenance.run_details.metadata.invocation_id
    print(message.subject[0].digest["sha256"])
