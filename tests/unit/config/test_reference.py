"""The keys as the documentation lists them."""

from samestep.config.reference import describe_key, schema_keys


def test_every_key_has_a_sentence():
    keys = schema_keys()
    assert len(keys) > 100
    for key in keys:
        assert describe_key(key)[3], key
