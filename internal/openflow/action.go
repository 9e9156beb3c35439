package openflow

import (
	"encoding/binary"
	"fmt"
)

// Action is an action of a flow: Output, OutputTo, Set, Move, DecTTL, or Other for flows that were read.
type Action interface {
	append(b []byte) []byte
	String() string
}

// Ports with a meaning.
const (
	LocalPort uint32 = 0xfffffffe // the bridge's own device
	anyPort   uint32 = 0xffffffff
)

// Output sends a copy of the packet, with the changes of earlier actions. It never sends to the ingress port: see
// ForgetPort.
type Output uint32

// OutputTo sends the packet to the port number in the first 16 bits of a field.
type OutputTo struct{ Field Field }

// Set writes a value.
type Set struct{ Value }

// Move copies bits of a field, counted from the lowest, to another.
type Move struct {
	Bits           uint16
	From, To       Field
	FromBit, ToBit uint16
}

// DecTTL decrements the hop limit. The flow must match packets of one family.
type DecTTL struct{}

// Other is an action that this package reads but does not know.
type Other struct {
	Type uint16
	Body []byte
}

// ForgetPort clears the ingress port, so that the packet may return to it.
var ForgetPort = Set{inPort16.Number(0)}

const (
	typeOutput   = 0
	typeDecTTL   = 24
	typeSetField = 25
	typeExtended = 0xffff

	nicira       = 0x2320
	niciraMove   = 6
	niciraOutput = 15
)

func (a Output) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, typeOutput)
	b = binary.BigEndian.AppendUint16(b, 16)
	b = binary.BigEndian.AppendUint32(b, uint32(a))
	return append(b, make([]byte, 8)...)
}

func (a OutputTo) append(b []byte) []byte {
	b = appendNicira(b, niciraOutput, 24)
	b = binary.BigEndian.AppendUint16(b, 16-1) // 16 bits from bit 0
	b = binary.BigEndian.AppendUint32(b, a.Field.header(false))
	return append(b, make([]byte, 8)...)
}

func (a Set) append(b []byte) []byte {
	start := len(b)
	b = binary.BigEndian.AppendUint16(b, typeSetField)
	b = append(b, 0, 0)
	b = pad(a.Value.append(b), start)
	binary.BigEndian.PutUint16(b[start+2:], uint16(len(b)-start))
	return b
}

func (a Move) append(b []byte) []byte {
	b = appendNicira(b, niciraMove, 24)
	for _, n := range []uint16{a.Bits, a.FromBit, a.ToBit} {
		b = binary.BigEndian.AppendUint16(b, n)
	}
	b = binary.BigEndian.AppendUint32(b, a.From.header(false))
	return binary.BigEndian.AppendUint32(b, a.To.header(false))
}

func (DecTTL) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, typeDecTTL)
	return append(b, 0, 8, 0, 0, 0, 0)
}

func (a Other) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, a.Type)
	b = binary.BigEndian.AppendUint16(b, uint16(4+len(a.Body)))
	return append(b, a.Body...)
}

func appendNicira(b []byte, subtype, length uint16) []byte {
	b = binary.BigEndian.AppendUint16(b, typeExtended)
	b = binary.BigEndian.AppendUint16(b, length)
	b = binary.BigEndian.AppendUint32(b, nicira)
	return binary.BigEndian.AppendUint16(b, subtype)
}

func (a Output) String() string {
	if uint32(a) == LocalPort {
		return "output:LOCAL"
	}
	return fmt.Sprintf("output:%d", uint32(a))
}
func (a OutputTo) String() string { return fmt.Sprintf("output:%v", a.Field) }
func (a Set) String() string      { return "set " + a.Value.String() }
func (a Move) String() string {
	return fmt.Sprintf("move %d bits of %v[%d] to %v[%d]", a.Bits, a.From, a.FromBit, a.To, a.ToBit)
}
func (DecTTL) String() string  { return "dec_ttl" }
func (a Other) String() string { return fmt.Sprintf("action %d", a.Type) }

// readActions reads a list of actions.
func readActions(b []byte) (all []Action, err error) {
	for len(b) > 0 {
		if len(b) < 4 {
			return nil, cut("action", b)
		}
		kind, length := binary.BigEndian.Uint16(b), int(binary.BigEndian.Uint16(b[2:]))
		if length < 8 || length%8 != 0 || length > len(b) {
			return nil, cut("action", b)
		}
		body := b[4:length:length]
		b = b[length:]
		switch {
		case kind == typeOutput && length == 16:
			all = append(all, Output(binary.BigEndian.Uint32(body)))
		case kind == typeDecTTL:
			all = append(all, DecTTL{})
		case kind == typeSetField:
			v, _, err := readValue(body)
			if err != nil {
				return nil, err
			}
			all = append(all, Set{v})
		default:
			all = append(all, Other{kind, body})
		}
	}
	return all, nil
}
