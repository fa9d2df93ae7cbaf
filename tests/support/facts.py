"""Three small documents that both adapters' tests ingest."""

FACTS = (
    "The lighthouse of Norrhamn was built in 1874 and is painted red and white.",
    "Marta Ekholm keeps the lighthouse since 1998; she grows tomatoes behind it.",
    "The ferry to Norrhamn leaves at nine in the morning and at five in the afternoon.",
)
