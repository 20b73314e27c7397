"""engine/fsdp"""
