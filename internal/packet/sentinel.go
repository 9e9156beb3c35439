package packet

import (
	"bytes"
	"crypto/rand"
)

// Sentinel is a unique payload. A test sends it along a path that must work: when the capture sees it, the capture
// works and contains everything sent before.
type Sentinel [16]byte

func NewSentinel() Sentinel {
	var s Sentinel
	_, _ = rand.Read(s[:]) // never fails
	return s
}

// In reports whether a captured frame contains the sentinel, whatever its addresses are.
func (s Sentinel) In(c Captured) bool { return bytes.Contains(c.Frame, s[:]) }
