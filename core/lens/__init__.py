"""What people who watch an engine are shown of it: steps, queue, pages, the cache's tree. Kept only while they look."""
