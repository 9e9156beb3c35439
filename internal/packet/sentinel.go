package packet

import (
	"bytes"
	"crypto/rand"
)

// Sentinel is a payload nothing else carries. Sent along a path that must work, and seen by a
// capture, it proves the capture alive and that everything sent before it has been seen too.
type Sentinel [16]byte

func NewSentinel() Sentinel {
	var s Sentinel
	_, _ = rand.Read(s[:]) // never fails
	return s
}

// In reports whether a captured frame carries the sentinel, whatever its addresses are.
func (s Sentinel) In(c Captured) bool { return bytes.Contains(c.Frame, s[:]) }
