// Package endpoint is a container's attachment point on a node: its record, the states it goes
// through, the cursors from which indexes are drawn, and how all of it is kept on disk. It
// touches no kernel object; see package datapath for that.
package endpoint
