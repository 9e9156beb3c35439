package openflow

import (
	"encoding/binary"
	"fmt"
	"strings"
)

// Flow is an entry of a bridge's table.
type Flow struct {
	Table    uint8
	Priority uint16
	Cookie   uint64 // chosen by the controller, to find the flow again
	Match    []Value
	Actions  []Action
	Goto     uint8 // the next table; 0: none

	Packets uint64 // packets that matched; only for flows that were read
}

func (f Flow) String() string {
	var match, actions []string
	for _, v := range f.Match {
		match = append(match, v.String())
	}
	for _, a := range f.Actions {
		actions = append(actions, a.String())
	}
	switch {
	case f.Goto != 0:
		actions = append(actions, fmt.Sprintf("goto %d", f.Goto))
	case len(actions) == 0:
		actions = []string{"drop"}
	}
	return fmt.Sprintf(
		"table %d, priority %d: %s: %s",
		f.Table,
		f.Priority,
		strings.Join(match, ","),
		strings.Join(actions, ","),
	)
}

// Command is the type of a change.
type Command uint8

const (
	// Add adds a flow, or replaces the one with the same table, match and priority.
	Add Command = 0
	// DeleteLoose removes all flows of a table that the given match includes, at any priority. The bridge has to search
	// for them.
	DeleteLoose Command = 3
	// Delete removes the flow with this table, match and priority, if it exists.
	Delete Command = 4
)

func (c Command) String() string {
	return map[Command]string{Add: "add", DeleteLoose: "delete loosely", Delete: "delete"}[c]
}

// Change adds or deletes flows of a bridge. A deletion removes only flows whose cookie equals Flow.Cookie in the bits
// of CookieMask.
type Change struct {
	Command Command
	Flow
	CookieMask uint64
}

const (
	noBuffer  uint32 = 0xffffffff
	anyGroup  uint32 = 0xffffffff
	allTables        = 0xff

	instructionGoto  = 1
	instructionApply = 4
)

// append writes the flow_mod without its header.
func (c Change) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, c.Cookie)
	b = binary.BigEndian.AppendUint64(b, c.CookieMask)
	b = append(b, c.Table, byte(c.Command), 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, c.Priority)
	for _, n := range []uint32{noBuffer, anyPort, anyGroup, 0} {
		b = binary.BigEndian.AppendUint32(b, n)
	}
	b = appendMatch(b, c.Match)
	if c.Command != Add {
		return b
	}
	if len(c.Actions) > 0 {
		start := len(b)
		b = binary.BigEndian.AppendUint16(b, instructionApply)
		b = append(b, 0, 0, 0, 0, 0, 0)
		for _, a := range c.Actions {
			b = a.append(b)
		}
		binary.BigEndian.PutUint16(b[start+2:], uint16(len(b)-start))
	}
	if c.Goto != 0 {
		b = binary.BigEndian.AppendUint16(b, instructionGoto)
		b = append(b, 0, 8, c.Goto, 0, 0, 0)
	}
	return b
}

func appendMatch(b []byte, match []Value) []byte {
	start := len(b)
	b = append(b, 0, 1, 0, 0) // OXM
	for _, v := range match {
		b = v.append(b)
	}
	binary.BigEndian.PutUint16(b[start+2:], uint16(len(b)-start))
	return pad(b, start)
}

// pad pads to a multiple of eight bytes from start.
func pad(b []byte, start int) []byte {
	return append(b, make([]byte, -(len(b)-start)&7)...)
}

// appendFlowRequest requests all flows whose cookies equal cookie in the bits of mask.
func appendFlowRequest(b []byte, cookie, mask uint64) []byte {
	b = append(b, 0, multipartFlow, 0, 0, 0, 0, 0, 0)
	b = append(b, allTables, 0, 0, 0)
	for _, n := range []uint32{anyPort, anyGroup, 0} {
		b = binary.BigEndian.AppendUint32(b, n)
	}
	b = binary.BigEndian.AppendUint64(b, cookie)
	b = binary.BigEndian.AppendUint64(b, mask)
	return appendMatch(b, nil)
}

const flowStatsLen = 48 // length before the match

// readFlows reads the flows of a multipart reply.
func readFlows(b []byte) (all []Flow, err error) {
	for len(b) > 0 {
		if len(b) < 2 {
			return nil, cut("flow", b)
		}
		length := int(binary.BigEndian.Uint16(b))
		if length < flowStatsLen || length > len(b) {
			return nil, cut("flow", b)
		}
		f, err := readFlow(b[:length])
		if err != nil {
			return nil, err
		}
		all, b = append(all, f), b[length:]
	}
	return all, nil
}

func readFlow(b []byte) (f Flow, err error) {
	f = Flow{
		Table: b[2], Priority: binary.BigEndian.Uint16(b[12:]),
		Cookie: binary.BigEndian.Uint64(b[24:]), Packets: binary.BigEndian.Uint64(b[32:]),
	}
	match, rest, err := readMatch(b[flowStatsLen:])
	if err != nil {
		return f, err
	}
	f.Match = match
	for len(rest) > 0 {
		if len(rest) < 8 {
			return f, cut("instruction", rest)
		}
		kind, length := binary.BigEndian.Uint16(rest), int(binary.BigEndian.Uint16(rest[2:]))
		if length < 8 || length > len(rest) {
			return f, cut("instruction", rest)
		}
		switch kind {
		case instructionApply:
			if f.Actions, err = readActions(rest[8:length]); err != nil {
				return f, err
			}
		case instructionGoto:
			f.Goto = rest[4]
		}
		rest = rest[length:]
	}
	return f, nil
}

func readMatch(b []byte) (match []Value, rest []byte, err error) {
	if len(b) < 4 {
		return nil, nil, cut("match", b)
	}
	length := int(binary.BigEndian.Uint16(b[2:]))
	padded := (length + 7) &^ 7
	if length < 4 || padded > len(b) {
		return nil, nil, cut("match", b)
	}
	for fields := b[4:length]; len(fields) > 0; {
		var v Value
		if v, fields, err = readValue(fields); err != nil {
			return nil, nil, err
		}
		match = append(match, v)
	}
	return match, b[padded:], nil
}

func cut(what string, b []byte) error {
	return fmt.Errorf("%s is cut short or contradicts its length; %d bytes are left of the message", what, len(b))
}
