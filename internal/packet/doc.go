// Package packet builds, decodes, injects and captures packets, and pings. Tests, the lab and the demo check the
// network with it, so it shares no code with the datapath.
package packet
