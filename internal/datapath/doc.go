// Package datapath drives the packet path in the kernel: it loads the eBPF programs of bpf/, keeps
// their maps and links pinned, makes the device pairs of endpoints and the containers' side of
// them, and reads back what the kernel holds and counts. It owns every hook; nobody else attaches
// anything to the uplink.
//
// What it leaves in the kernel works without it: closing a Datapath, or killing the agent that
// holds it, stops nothing.
package datapath

//go:generate go tool bpf2go -no-global-types -cc clang-16 -strip llvm-strip-16 -target bpfel -type addr -type drop_event -type drop_state -type flow_key -type flow -type source -type local -type tenant -type key_request -type plug -type peer_key -type sender_key -type sender -type foreign_key -type foreign -type scoped_prefix -type scoped_addr -type translation -type route -type nimitz_node -type subject_key -type subject -type app_key -type app_rules -type block_key -type block_rules -type ruling -type port_key -type port_rules -type range_key -type range_rules -type session_key -type session_state -type session -type session_bucket -type session_counts -type pre_actions -type ends -type why_request -type moment -type outcome -type action_request -type verdict -type fragment_key -type turn -go-package datapath pilaster ../../bpf/pilaster.bpf.c -- -O2 -g -Wall -Werror -mcpu=v3
