// Package packet builds, takes apart, injects and captures packets, and pings. It is what tests,
// the lab and the demo judge the network with, so it shares no code with the datapath.
package packet
