package bpfobj

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
)

// ethernetHeader is the length in bytes of the header before a request: a program for packets needs a packet.
const ethernetHeader = 14

// RunRequest runs a program that only the agent runs, on a request that it passes as a packet behind an Ethernet
// header, and replaces the request by what the program left there. It returns an error if the program's result is not
// 0.
func RunRequest[T any](p *ebpf.Program, request *T) error {
	frame, err := binary.Append(make([]byte, ethernetHeader), binary.NativeEndian, request)
	if err != nil {
		return err
	}
	out := make([]byte, len(frame))
	result, err := p.Run(&ebpf.RunOptions{Data: frame, DataOut: out})
	if err != nil {
		return err
	}
	if result != 0 {
		return fmt.Errorf("result %d", int32(result))
	}
	_, err = binary.Decode(out[ethernetHeader:], binary.NativeEndian, request)
	return err
}
