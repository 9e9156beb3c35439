package agenttest

import "google.golang.org/protobuf/proto"

// Later adds a field to a message that only a later build knows: number 1000, "later".
func Later[M proto.Message](m M) M {
	m.ProtoReflect().SetUnknown([]byte{0xc2, 0x3e, 5, 'l', 'a', 't', 'e', 'r'})
	return m
}
