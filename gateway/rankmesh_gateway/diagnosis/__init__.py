"""Diagnosis of jobs: reports on their ranks, and from these the causes of waits in words."""
