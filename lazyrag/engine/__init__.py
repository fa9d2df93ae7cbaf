"""From segments to tokens: pool of pages, step plan, decode loop, report."""
