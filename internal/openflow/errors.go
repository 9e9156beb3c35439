package openflow

import (
	"encoding/binary"
	"fmt"
)

// Error is a bridge's answer to a request that it rejected.
type Error struct {
	Type, Code uint16
	About      string // the request
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.About, e.reason()) }

// errorType has the text for an error type, and for its codes. It omits codes that the requests of this package cannot
// cause.
type errorType struct {
	name  string
	codes map[uint16]string
}

var errorTypes = map[uint16]errorType{
	0: {
		"no version of OpenFlow in common",
		map[uint16]string{
			0: "the bridge does not support OpenFlow 1.4; check its column \"protocols\"",
			1: "permission denied",
		},
	},
	1: {"bad request", map[uint16]string{
		0: "version", 1: "type", 2: "multipart type", 3: "experimenter", 4: "experimenter's type",
		5: "permission denied", 6: "length", 9: "no such table",
		13: "multipart too long",
	}},
	2: {"bad action", map[uint16]string{
		0: "unknown type", 1: "length", 2: "unknown experimenter", 3: "unknown type of the experimenter",
		4: "no such port", 5: "bad argument", 6: "permission denied",
		7: "too many actions", 10: "the match does not fit it", 13: "field unknown or not to be set",
		14: "length of the field", 15: "value of the field",
	}},
	3: {
		"bad instruction",
		map[uint16]string{
			0: "unknown type",
			1: "unsupported",
			2: "no such table to go to",
			7: "length",
			9: "permission denied",
		},
	},
	4: {"bad match", map[uint16]string{
		0: "unknown type", 1: "length", 4: "address mask", 6: "unknown field", 7: "value", 8: "mask",
		9: "a field that it depends on is missing", 10: "a field is there twice",
		11: "permission denied",
	}},
	5: {"flow not changed", map[uint16]string{
		0: "for an unknown reason", 1: "the table is full", 2: "no such table", 3: "it overlaps another",
		4: "permission denied", 5: "timeout", 6: "unknown command", 7: "unknown flags",
	}},
	13: {"multipart request", nil},
	17: {"bundle", map[uint16]string{
		0: "for an unknown reason", 1: "permission denied", 2: "no such bundle", 3: "its number is in use",
		4: "it is closed", 5: "too many bundles", 6: "length",
		7: "a change in it cannot be made", 8: "too many messages in it", 9: "a message is not of its transaction",
		10: "flags", 11: "length of a message in it", 12: "out of time", 13: "another bundle is open",
	}},
}

func (e *Error) reason() string {
	t, known := errorTypes[e.Type]
	if !known {
		return fmt.Sprintf("OpenFlow error, type %d, code %d", e.Type, e.Code)
	}
	if code, known := t.codes[e.Code]; known {
		return fmt.Sprintf("%s: %s", t.name, code)
	}
	return fmt.Sprintf("%s: code %d", t.name, e.Code)
}

func readError(b []byte, about string) error {
	if len(b) < 4 {
		return cut("error", b)
	}
	return &Error{binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:]), about}
}
