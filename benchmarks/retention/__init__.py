"""Retention: what a fine-tuned network still knows, with limpet and with what people would do instead."""
