// Package sharing is the work of a node in offloads that needs no change of entries: as a backend it probes the
// frontends (Prober), and for all offloads it measures its packet load and its tables (Meter).
package sharing
