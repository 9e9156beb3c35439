// Package offload decides which nodes share the load of others (Nezha §4, B, C; NZ4–NZ7). It does no I/O, reads no
// clock and starts no goroutine: records, reports and the time come in, desired changes with their reasons come out.
//
// An offload is a tenant's containers on one node, the backend, whose rules are looked up on other nodes, the
// frontends. Its record (tenant.Offload, with Record's fields) is in the store. Step compares each record with the
// reports and returns at most one Change for it, which the orchestrator writes if the record's Since is still the same.
// So each step may be repeated, and by any orchestrator.
//
// For each record Step asks, in this order:
//
//  1. Is the phase complete? preparing, dual, active; back: returning, ending. A phase waits for acknowledgements
//     (Hosted.Applied >= Record.Since), and for senders a bounded time only: a packet that comes to the backend without
//     pre-actions is not lost. What a start cannot finish in 8 s is undone.
//  2. Are more than half of all frontends reported as lost? Then the network is more likely to be at fault than they
//     are: no frontend is removed (C.2) or added, and no offload begins.
//  3. Does it have its frontends (maintain)? A lost one goes at once. One with too much load of its own or with old
//     policies goes when another is ready. Frontends come as draining, load the rules, and become active together.
//     The active ones are always a power of two: what is left over waits as a reserve, with its rules.
//  4. With Auto: is a frontend at 40 % because of what it does for others? Then their number doubles (scaleOut). Would
//     the backend stay below 50 % with its rules for 60 s? Then they return (fallBack).
//
// Then, with Auto, nodes at 70 % for 3 s get an offload of the tenant that needs most, if Estimate says that this is a
// gain (start).
//
// Frontends are chosen in choose: the backend's rack first, then nodes with the tenant's rules, then nodes alike in
// CPUs, then those with the least load. A frontend lends at most half of its free rules. What was decided in this step,
// or is not reported yet, counts as used.
//
// Against oscillation: 70 % to start and 50 % to return, 40 % to leave a frontend and 30 % to choose one; durations
// without interruption; 10 s between changes that are not urgent; a replaced frontend is not chosen again for 10 min;
// each return of the same offload doubles the time until its next return, each loss of the same frontend the time until
// it is used again. No frontend is removed because of too little load (B.2).
//
// The Controller's memory has times and counts: since when a condition lasts, until when something must not be
// repeated. A new orchestrator begins without it. Then a duration begins anew (a start, return or reuse comes later,
// never earlier), and doublings and avoided nodes are forgotten (the same exchange may happen once more for each new
// orchestrator).
//
// What is not here: reading and writing the store (internal/orchestrator), loading rules and probing frontends
// (internal/agent), packets (the data path). docs/explanation/load-sharing.md has the whole.
package offload
