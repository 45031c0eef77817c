"""What breaks: damaged files, hostile pickles, refusals, small disks."""
