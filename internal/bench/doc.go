// Package bench compares packet paths. Each scenario connects a client and a server in its own way. One run measures
// all scenarios in turn, so that disturbances of the machine affect all of them equally. The result is the ratio of
// each figure to the figure of scenario native in the same round.
//
// It covers NETPILA §6.2's first packet (NP4) and §7.2 (NP11), the comparison with ONCache (OC1), and the cost of rules
// (NZ10, CI1). It creates its own namespaces and changes nothing outside them.
package bench
