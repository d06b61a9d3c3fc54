"""What carries out a group's calls: ``base`` is the seam, ``mesh`` the data plane for arrays in host memory."""
