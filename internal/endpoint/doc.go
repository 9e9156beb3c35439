// Package endpoint holds a container's attachment point on a node: its record, its states, the cursors that allocate
// indexes, and their files. It touches no kernel object; package datapath does.
package endpoint
