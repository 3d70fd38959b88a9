"""The estimators in plain torch: what the tests trust and what runs on CPU. The numbers are those of docs/estimators.md."""
