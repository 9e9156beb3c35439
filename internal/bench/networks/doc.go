// Package networks compares all networks of this build with each other, with bare nodes and with overlays of the
// kernel, in one run: speed, bytes on the wire, state for other nodes, messages of the orchestrator, time until a
// container is reachable, and what each network isolates and hides. It measures two real nodes, and simulated clusters
// around them.
//
// A network is one entry of the list in registry.go.
package networks
