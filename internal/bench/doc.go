// Package bench compares packet paths: each scenario connects a client and a server in its own way, and one run
// measures all of them in turn, so that disturbances of the machine affect all alike. The result is the ratio to the
// native figure of the same round, not the figure.
//
// It covers NETPILA §6.2's first packet (NP4) and §7.2 (NP11), the comparison with ONCache (OC1), and the cost of rules
// (NZ10, CI1). It builds its own namespaces and changes nothing outside them.
package bench
