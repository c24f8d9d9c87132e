"""HTTP: OpenAI's wire contract in front of `embedsvc.service`; nothing below imports it."""
