// Injected failures.
