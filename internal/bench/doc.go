// Package bench measures packet paths against each other: each scenario joins a client and a server in its own way, and
// all of them are measured in turn within one run, so that what the machine does meanwhile hits them alike. What counts
// is the ratio to the same round's native figure, not the figure.
//
// It covers NETPILA §6.2's first packet (NP4) and §7.2 (NP11), what ONCache is compared to (OC1), and what rules cost
// (NZ10, CI1). It builds its namespaces itself and touches nothing outside them.
package bench
