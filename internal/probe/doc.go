// Package probe has what the probers of other nodes share: when to probe, and how to count missing answers. What a
// probe is, and what follows from an answer, is in the packages that probe: sharing, gateways and nodeprobe.
package probe
