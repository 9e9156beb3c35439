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
	result, err := TryRequest(p, request)
	if err == nil && result != 0 {
		err = fmt.Errorf("result %d", int32(result))
	}
	return err
}

// TryRequest is RunRequest for a program of which every result is an answer.
func TryRequest[T any](p *ebpf.Program, request *T) (result uint32, err error) {
	frame, err := binary.Append(make([]byte, ethernetHeader), binary.NativeEndian, request)
	if err != nil {
		return 0, err
	}
	out := make([]byte, len(frame))
	if result, err = p.Run(&ebpf.RunOptions{Data: frame, DataOut: out}); err != nil || result != 0 {
		return result, err
	}
	_, err = binary.Decode(out[ethernetHeader:], binary.NativeEndian, request)
	return 0, err
}
