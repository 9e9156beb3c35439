// Package address implements the 128 bits of a Pilaster address: it composes and splits the plaintext form, computes
// the AES-128 ciphertext form that containers see, and finds an index whose ciphertext lies in the private prefix.
// It is pure: no I/O, no clock, no state.
//
//	 0                              64              88        104          128
//	|  node address                |  tenant id 24 |  app 16 |  index 24  |
//
// The form is NETPILA §6.1 with the 40 container bits split into app and index; the cipher is NETPILA §6.2.
package address
