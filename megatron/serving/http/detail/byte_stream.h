// A connected socket with or without TLS, for coroutines. Includes Asio: for few sources.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "megatron/serving/http/detail/asio.h"

namespace megatron {

using TcpSocket = boost::asio::ip::tcp::socket;
using ErrorCode = boost::system::error_code;

// One thread uses it. Operations that close_now() or cancel() interrupt end with an error.
class ByteStream {
 public:
  virtual ~ByteStream() = default;

  // TLS's handshake; nothing otherwise.
  virtual boost::asio::awaitable<ErrorCode> handshake() = 0;
  // Waits until bytes have arrived and appends them to `out`. The end of the stream is an error.
  // Without TLS no buffer is held while it waits.
  virtual boost::asio::awaitable<ErrorCode> read(std::string& out) = 0;
  // Writes all of `bytes`, which must stay valid until then.
  virtual boost::asio::awaitable<ErrorCode> write(std::string_view bytes) = 0;
  // Tells the other side that nothing more will be written.
  virtual boost::asio::awaitable<void> finish_writing() = 0;

  virtual TcpSocket& socket() = 0;
  void cancel();
  void close_now();
};

std::unique_ptr<ByteStream> make_plain_stream(TcpSocket socket);
// `server_name`: for a client, the name that the certificate must have; null: a server.
std::unique_ptr<ByteStream> make_tls_stream(TcpSocket socket, boost::asio::ssl::context& context,
                                            const std::string* server_name);

// Contexts with the files of a server; with the system's authorities for a client (`ca_file`:
// another one, empty: the system's). Throw Error that names the file.
std::shared_ptr<boost::asio::ssl::context> make_server_tls(const std::string& certificate_file,
                                                           const std::string& key_file);
std::shared_ptr<boost::asio::ssl::context> make_client_tls(const std::string& ca_file);

}  // namespace megatron
