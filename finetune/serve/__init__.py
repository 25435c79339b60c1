"""A server for the Tinker SDK: several clients train and sample over one stream of a base."""
