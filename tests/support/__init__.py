"""What several tests need: ranks as threads, ranks as processes."""
