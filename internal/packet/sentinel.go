package packet

import (
	"bytes"
	"crypto/rand"
)

// Sentinel is a unique payload. A test sends it on a path that must work. When the capture has the sentinel, the
// capture works and has all frames that were sent earlier.
type Sentinel [16]byte

func NewSentinel() Sentinel {
	var s Sentinel
	_, _ = rand.Read(s[:]) // never fails
	return s
}

// In reports whether a captured frame contains the sentinel, whatever its addresses are.
func (s Sentinel) In(c Captured) bool { return bytes.Contains(c.Frame, s[:]) }
