package join

import (
	"crypto/rand"
	"fmt"
	"regexp"
)

var uuidForm = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// NewUUID returns a random UUID (RFC 9562, version 4), lower-case with dashes, as of nodes and clusters.
func NewUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// IsUUID reports whether a text has the form of NewUUID's results.
func IsUUID(s string) bool { return uuidForm.MatchString(s) }
